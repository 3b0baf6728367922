"""What attention on one shard of the mesh gets, whatever the context-parallel strategy."""

from typing import Generic, NamedTuple, TypeVar

import jax

Leaf = TypeVar("Leaf")


class OperandTree(NamedTuple, Generic[Leaf]):
  """One leaf for each operand of attention; lower-case axes are parts of a shard."""

  q_bthc: Leaf
  k_bsgc: Leaf  # Of the shard's positions, or of all positions for `all_gather`.
  v_bsgc: Leaf
  sink_h: Leaf | None
  segment_bt: Leaf  # Of the shard's positions.
  segment_bS: Leaf  # Of all positions.


ShardOperands = OperandTree[jax.Array]  # The arrays of one shard.


class AttentionOptions(NamedTuple):
  """The options of the kernel, see kernels/attention/api.py."""

  backend: str
  block_q: int
  scale: float
  soft_cap: float = 0.0
  window: int | None = None
