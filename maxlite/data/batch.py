"""The batch of a training step: numpy rows of one host, or global arrays."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flax import struct

from maxlite.config.errors import UserError


@struct.dataclass
class Batch:
  """B rows of T positions, each row packed with segments of documents.

  `segment_BT` numbers the segments of a row 1, 2, ... and is 0 in padding; attention is limited to
  a segment. `position_BT` restarts at 0 in each segment. `targets_BT` is the next token of the
  same document; `weight_BT` (float32) is 0 where there is none. All other fields are int32.
  """

  tokens_BT: jax.Array | np.ndarray
  targets_BT: jax.Array | np.ndarray
  segment_BT: jax.Array | np.ndarray
  position_BT: jax.Array | np.ndarray
  weight_BT: jax.Array | np.ndarray


def abstract_batch(shape: tuple[int, int], sharding: jax.sharding.Sharding | None = None) -> Batch:
  """Return the shapes, dtypes and sharding of a [B, T] batch."""
  leaf: Any = functools.partial(jax.ShapeDtypeStruct, shape, sharding=sharding)
  ids = ("tokens_BT", "targets_BT", "segment_BT", "position_BT")
  return Batch(**{name: leaf(np.int32) for name in ids}, weight_BT=leaf(np.float32))


def contiguous_rows(indices: Iterable[slice], num_rows: int) -> range:
  """Return the union of `indices`. Raises UserError if it has a gap."""
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
  """Return the rows of a [B, T] batch that the devices of this process hold."""
  indices = sharding.addressable_devices_indices_map(global_shape).values()
  return contiguous_rows((index[0] for index in indices if index is not None), global_shape[0])


def to_global(local: Batch, sharding: jax.sharding.Sharding, shape: tuple[int, int]) -> Batch:
  """Assemble the global Batch from each host's `local_rows` (numpy, all positions)."""
  place = lambda x_BT: jax.make_array_from_process_local_data(sharding, x_BT, shape)
  return jax.tree.map(place, local)


def interleave(x: jax.Array, num_parts: int) -> jax.Array:
  """[B, ...] -> [num_parts, B / num_parts, ...]; each part has rows of every shard."""
  return x.reshape(-1, num_parts, *x.shape[1:]).swapaxes(0, 1)
