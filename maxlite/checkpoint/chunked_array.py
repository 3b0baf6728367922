"""Arrays that come in parts, so that none of them is ever whole in host memory."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

Index = tuple[slice, ...]  # with start and stop of every axis
PART_BYTES = 8 << 20  # about the size of a part


@dataclasses.dataclass(frozen=True)
class Stream:
  """An array of `shape` and `dtype`; `parts()` gives (index, values) that cover it once."""

  shape: tuple[int, ...]
  dtype: np.dtype
  part_shape: tuple[int, ...]  # of most parts, so that disks can store it so
  parts: Callable[[], Iterator[tuple[Index, np.ndarray]]]


def to_array(stream: Stream, sharding: jax.sharding.Sharding) -> jax.Array:
  """The array, each device holding its shard; parts go to the devices one by one."""
  shards = sharding.addressable_devices_indices_map(stream.shape)
  areas = {device: _bounds(index or (), stream.shape) for device, index in shards.items()}
  buffers = {
    device: jnp.zeros([axis.stop - axis.start for axis in area], stream.dtype, device=device)
    for device, area in areas.items()
  }
  for index, part in stream.parts():
    for device, area in areas.items():
      buffers[device] = _filled(buffers[device], area, index, part)
  return jax.make_array_from_single_device_arrays(
    stream.shape, sharding, list(buffers.values()), dtype=stream.dtype
  )


def cuts(index: Index, dtype: np.dtype) -> Iterator[Index]:
  """`index` in pieces of bounded size, cut along its longest axis."""
  sizes = [axis.stop - axis.start for axis in index]
  longest = int(np.argmax(sizes)) if sizes else 0
  if not math.prod(sizes):
    return
  bytes_each = math.prod(sizes) // sizes[longest] * dtype.itemsize
  for low, high in steps(sizes[longest], bytes_each):
    first = index[longest].start
    yield (*index[:longest], slice(first + low, first + high), *index[longest + 1 :])


def steps(size: int, bytes_each: int) -> Iterator[tuple[int, int]]:
  """(low, high) that cut range(size) into pieces of about PART_BYTES."""
  step = max(PART_BYTES // max(bytes_each, 1), 1)
  for low in range(0, size, step):
    yield low, min(low + step, size)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Index:
  return tuple(slice(*axis.indices(size)[:2]) for axis, size in zip(index, shape, strict=True))


def _filled(buffer: jax.Array, area: Index, index: Index, part: np.ndarray) -> jax.Array:
  """`buffer`, which holds `area` of the array, with what of `part` lies in it."""
  lows = [max(a.start, i.start) for a, i in zip(area, index, strict=True)]
  highs = [min(a.stop, i.stop) for a, i in zip(area, index, strict=True)]
  if any(low >= high for low, high in zip(lows, highs, strict=True)):
    return buffer
  bounds = zip(lows, highs, index, strict=True)
  inside = part[tuple(slice(low - i.start, high - i.start) for low, high, i in bounds)]
  start = np.asarray([low - a.start for low, a in zip(lows, area, strict=True)], np.int32)
  return _put(buffer, jax.device_put(inside, buffer.sharding), start)


@functools.partial(jax.jit, donate_argnums=0)
def _put(buffer: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice(buffer, part, tuple(start))
