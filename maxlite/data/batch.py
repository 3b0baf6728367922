"""What one step reads, and its way from this host's numpy rows to global arrays."""

from collections.abc import Iterable

import jax
import numpy as np
from flax import struct

from maxlite.config.errors import UserError


@struct.dataclass
class Batch:
  """B rows of T positions, packed with segments of documents; numpy on the host or global arrays.

  `segment_BT` counts 1, 2, ... within a row and is 0 in padding: attention stays within a segment.
  `position_BT` restarts at 0 in each segment. `targets_BT` is the next token of the same document;
  where there is none, `weight_BT` (float32) is 0. All others are int32.
  """

  tokens_BT: jax.Array | np.ndarray
  targets_BT: jax.Array | np.ndarray
  segment_BT: jax.Array | np.ndarray
  position_BT: jax.Array | np.ndarray
  weight_BT: jax.Array | np.ndarray


def contiguous_rows(indices: Iterable[slice], num_rows: int) -> range:
  """The rows that `indices` cover together. Raises UserError where they leave a gap."""
  spans = sorted({index.indices(num_rows)[:2] for index in indices})
  start, stop = spans[0]
  for first, last in spans[1:]:
    if first > stop:
      raise UserError(
        f"this host's devices hold rows {start}-{stop - 1} and {first}-{last - 1} of a batch, "
        "none between: let the mesh axes data and fsdp (dcn_data_parallelism, "
        "dcn_fsdp_parallelism) span the hosts, and no other axis that shards rows"
      )
    stop = max(stop, last)
  return range(start, stop)


def local_rows(sharding: jax.sharding.Sharding, global_shape: tuple[int, int]) -> range:
  """The rows of a [B, T] batch that this process's devices hold."""
  indices = sharding.addressable_devices_indices_map(global_shape).values()
  return contiguous_rows((index[0] for index in indices if index is not None), global_shape[0])


def to_global(
  local: Batch, sharding: jax.sharding.Sharding, global_shape: tuple[int, int]
) -> Batch:
  """The global Batch of which `local` (numpy, `local_rows`, every position) is this host's part."""
  return jax.tree.map(
    lambda x_BT: jax.make_array_from_process_local_data(sharding, x_BT, global_shape), local
  )


def interleave(x: jax.Array, num_parts: int) -> jax.Array:
  """[B, ...] -> [num_parts, B / num_parts, ...], each part with rows of every shard."""
  return x.reshape(-1, num_parts, *x.shape[1:]).swapaxes(0, 1)
