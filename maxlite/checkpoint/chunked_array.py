"""Arrays processed in chunks, so that none is in host memory as a whole."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Index = tuple[slice, ...]  # with start and stop for every axis
CHUNK_BYTES = 8 << 20  # approximate size of a chunk


@dataclasses.dataclass(frozen=True)
class ChunkedArray:
  """An array of `shape` and `dtype`; `chunks()` yields (index, values) that cover it once.

  `chunk_shape` is the shape of most chunks, and of the chunks on disk.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  chunk_shape: tuple[int, ...]
  chunks: Callable[[], Iterator[tuple[Index, np.ndarray]]]


def to_array(chunked: ChunkedArray, sharding: jax.sharding.Sharding) -> jax.Array:
  """Build the sharded array by copying chunk by chunk to the devices."""
  areas = {}
  buffers = {}
  indices = sharding.addressable_devices_indices_map(chunked.shape)
  for device, device_index in indices.items():
    area = bounded(device_index or (), chunked.shape)
    areas[device] = area
    shape = _sizes(area)
    buffers[device] = jnp.zeros(shape, chunked.dtype, device=device)
  for index, chunk in chunked.chunks():
    for device, area in areas.items():
      buffer = buffers[device]
      buffers[device] = _update(buffer, area, index, chunk)
  return jax.make_array_from_single_device_arrays(
    chunked.shape,
    sharding,
    list(buffers.values()),
    dtype=chunked.dtype,
  )


def bounded(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
  """Return `index` with explicit start and stop for every axis of `shape`."""
  explicit = []
  for axis, size in zip(index, shape, strict=True):
    start, stop, _ = axis.indices(size)
    explicit.append(slice(start, stop))
  return tuple(explicit)


def whole(shape: Sequence[int]) -> Index:
  """Return the index of a whole array."""
  return tuple(slice(0, size) for size in shape)


def split(index: Index, dtype: np.dtype) -> Iterator[Index]:
  """Split `index` along its longest axis into chunks of bounded size."""
  sizes = _sizes(index)
  num_elements = math.prod(sizes)
  if num_elements == 0:
    return
  longest = int(np.argmax(sizes))
  first = index[longest].start
  bytes_each = num_elements // sizes[longest] * dtype.itemsize
  before = index[:longest]
  after = index[longest + 1 :]
  for low, high in split_range(sizes[longest], bytes_each):
    part = slice(first + low, first + high)
    yield (*before, part, *after)


def relative(index: Index, area: Index) -> Index:
  """Return `index`, which is inside `area`, relative to the start of `area`."""
  inside = []
  for axis, area_axis in zip(index, area, strict=True):
    start = axis.start - area_axis.start
    stop = axis.stop - area_axis.start
    inside.append(slice(start, stop))
  return tuple(inside)


def split_range(size: int, bytes_each: int) -> Iterator[tuple[int, int]]:
  """Yield (low, high) that split range(size) into chunks of about CHUNK_BYTES."""
  step = max(CHUNK_BYTES // max(bytes_each, 1), 1)
  for low in range(0, size, step):
    yield low, min(low + step, size)


def _update(
  buffer: jax.Array,
  area: Index,
  index: Index,
  chunk: np.ndarray,
) -> jax.Array:
  """Copy the intersection of `chunk` at `index` into `buffer`, which holds `area` of the array."""
  overlap = _intersection(area, index)
  if overlap is None:
    return buffer
  values = chunk[relative(overlap, index)]
  on_device = jax.device_put(values, buffer.sharding)
  start = [axis.start for axis in relative(overlap, area)]
  start_A = np.asarray(start, np.int32)
  return _put(buffer, on_device, start_A)


def _intersection(a: Index, b: Index) -> Index | None:
  """Return the index that is in both; None if it is empty."""
  both = []
  for axis_a, axis_b in zip(a, b, strict=True):
    low = max(axis_a.start, axis_b.start)
    high = min(axis_a.stop, axis_b.stop)
    if low >= high:
      return None
    both.append(slice(low, high))
  return tuple(both)


def _sizes(index: Index) -> list[int]:
  """Return the shape of the part at `index`."""
  return [axis.stop - axis.start for axis in index]


@functools.partial(jax.jit, donate_argnums=0)
def _put(
  buffer: jax.Array,
  chunk: jax.Array,
  start_A: jax.Array | np.ndarray,
) -> jax.Array:
  """Write `chunk` into `buffer` at the index `start_A`."""
  return jax.lax.dynamic_update_slice(buffer, chunk, tuple(start_A))
