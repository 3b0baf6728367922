"""What attention on one shard of the mesh gets, whatever the context-parallel strategy."""

from typing import NamedTuple

import jax


class ShardOperands(NamedTuple):
  """The arrays of one shard; lower-case axes are its parts."""

  q_bthc: jax.Array
  k_bsgc: jax.Array  # Of the shard's positions, or of all positions for `all_gather`.
  v_bsgc: jax.Array
  sink_h: jax.Array | None
  segment_bt: jax.Array  # Of the shard's positions.
  segment_bS: jax.Array  # Of all positions.


class AttentionOptions(NamedTuple):
  """The options of the kernel, see kernels/attention/api.py."""

  backend: str
  block_q: int
  scale: float
  soft_cap: float = 0.0
  window: int | None = None
