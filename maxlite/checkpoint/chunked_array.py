"""Arrays processed in chunks, so that none is held in host memory as a whole."""

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
  """An array of `shape` and `dtype`; `chunks()` yields (index, values) that cover it once."""

  shape: tuple[int, ...]
  dtype: np.dtype
  chunk_shape: tuple[int, ...]  # of most chunks, for the chunks on disk
  chunks: Callable[[], Iterator[tuple[Index, np.ndarray]]]


def to_array(chunked: ChunkedArray, sharding: jax.sharding.Sharding) -> jax.Array:
  """Build the sharded array by copying chunk by chunk to the devices."""
  indices = sharding.addressable_devices_indices_map(chunked.shape)
  areas = {device: bounded(index or (), chunked.shape) for device, index in indices.items()}
  buffers = {
    device: jnp.zeros([axis.stop - axis.start for axis in area], chunked.dtype, device=device)
    for device, area in areas.items()
  }
  for index, chunk in chunked.chunks():
    for device, area in areas.items():
      buffers[device] = _update(buffers[device], area, index, chunk)
  return jax.make_array_from_single_device_arrays(
    chunked.shape, sharding, list(buffers.values()), dtype=chunked.dtype
  )


def bounded(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
  """Return `index` with explicit start and stop for every axis of `shape`."""
  return tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(index, shape, strict=True))


def whole(shape: Sequence[int]) -> Index:
  """Return the index of a whole array."""
  return tuple(slice(0, size) for size in shape)


def split(index: Index, dtype: np.dtype) -> Iterator[Index]:
  """Split `index` along its longest axis into chunks of bounded size."""
  sizes = [axis.stop - axis.start for axis in index]
  if not math.prod(sizes):
    return
  n = int(np.argmax(sizes))
  first, bytes_each = index[n].start, math.prod(sizes) // sizes[n] * dtype.itemsize
  for low, high in split_range(sizes[n], bytes_each):
    yield (*index[:n], slice(first + low, first + high), *index[n + 1 :])


def split_range(size: int, bytes_each: int) -> Iterator[tuple[int, int]]:
  """Yield (low, high) that split range(size) into chunks of about CHUNK_BYTES."""
  step = max(CHUNK_BYTES // max(bytes_each, 1), 1)
  for low in range(0, size, step):
    yield low, min(low + step, size)


def _update(buffer: jax.Array, area: Index, index: Index, chunk: np.ndarray) -> jax.Array:
  """Copy the intersection of `chunk` at `index` into `buffer`, which holds `area` of the array."""
  lows = [max(a.start, i.start) for a, i in zip(area, index, strict=True)]
  highs = [min(a.stop, i.stop) for a, i in zip(area, index, strict=True)]
  if any(low >= high for low, high in zip(lows, highs, strict=True)):
    return buffer
  bounds = zip(lows, highs, index, strict=True)
  inside = chunk[tuple(slice(low - i.start, high - i.start) for low, high, i in bounds)]
  start = np.asarray([low - a.start for low, a in zip(lows, area, strict=True)], np.int32)
  return _put(buffer, jax.device_put(inside, buffer.sharding), start)


@functools.partial(jax.jit, donate_argnums=0)
def _put(buffer: jax.Array, chunk: jax.Array, start: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice(buffer, chunk, tuple(start))
