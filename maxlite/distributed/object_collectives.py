"""Collectives on JSON values and bytes outside of the step; every process must call each."""

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_CHUNK_BYTES = 16 << 20


def all_gather_object(value: Any) -> list[Any]:
  """The JSON values of all processes, in order of process id."""
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.asarray(text.size, np.int32))
  padded = np.zeros(1 << (int(sizes.max()) - 1).bit_length(), np.uint8)  # few shapes to compile
  padded[: text.size] = text
  texts = multihost_utils.process_allgather(padded)
  return [json.loads(each[:size].tobytes()) for each, size in zip(texts, sizes, strict=True)]


def broadcast_bytes(data: np.ndarray | None, source: int, num_bytes: int) -> np.ndarray:
  """The bytes (uint8) of process `source`; the `data` of the others is ignored."""
  is_source = jax.process_index() == source
  received = np.empty(num_bytes, np.uint8)
  for part in _chunks(num_bytes):
    chunk = data[part] if is_source and data is not None else np.empty_like(received[part])
    received[part] = multihost_utils.broadcast_one_to_all(chunk, is_source=is_source)
  return received


def shift_bytes(data: np.ndarray, num_bytes: int, distance: int) -> np.ndarray:
  """The `num_bytes` bytes (uint8) of the process whose id is lower by `distance`, modulo count."""
  shift, sharding = _build_shift(distance)
  (device,) = sharding.addressable_devices
  received = np.empty(num_bytes, np.uint8)
  longest = int(max(all_gather_object(max(data.size, num_bytes))))
  for part in _chunks(longest):
    chunk = np.zeros((1, part.stop - part.start), np.uint8)
    chunk[0, : data[part].size] = data[part]
    shape = (jax.process_count(), chunk.size)
    on_device = [jax.device_put(chunk, device)]
    shifted = shift(jax.make_array_from_single_device_arrays(shape, sharding, on_device))
    received[part] = np.asarray(shifted.addressable_data(0))[0, : received[part].size]
  return received


@functools.cache
def _build_shift(distance: int) -> tuple[Callable[[jax.Array], jax.Array], NamedSharding]:
  """A jitted shift of rows by `distance` processes, with one row on one device of each process."""
  count = jax.process_count()
  first = {device.process_index: device for device in reversed(jax.devices())}
  mesh = Mesh(np.array([first[process] for process in range(count)]), ("process",))
  spec = PartitionSpec("process")
  pairs = [(process, (process + distance) % count) for process in range(count)]
  permute = lambda row: jax.lax.ppermute(row, "process", pairs)
  shift = jax.jit(jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec))
  return shift, NamedSharding(mesh, spec)


def _chunks(num_bytes: int) -> Iterator[slice]:
  for low in range(0, num_bytes, _CHUNK_BYTES):
    yield slice(low, min(low + _CHUNK_BYTES, num_bytes))
