"""Collectives on JSON values and bytes outside of the step; every process must call each."""

import functools
import json
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlite.storage.json_values import Json

_CHUNK_BYTES = 16 << 20


def all_gather_object(value: Json) -> list[Json]:
  """Return the JSON values of all processes, in order of process id."""
  if jax.process_count() == 1:
    return [value]
  encoded = json.dumps(value).encode()
  text = np.frombuffer(encoded, np.uint8)
  own_size = np.asarray(text.size, np.int32)
  sizes = multihost_utils.process_allgather(own_size)
  padded = np.zeros(_power_of_two(int(sizes.max())), np.uint8)  # few shapes to compile
  padded[: text.size] = text
  padded_texts = multihost_utils.process_allgather(padded)
  values = []
  for padded_text, size in zip(padded_texts, sizes, strict=True):
    received = padded_text[:size].tobytes()
    values.append(json.loads(received))
  return values


def _power_of_two(size: int) -> int:
  """Return the first power of two that is not below `size`; `size` is at least 1."""
  return 1 << (size - 1).bit_length()


def broadcast_bytes(data: np.ndarray | None, source: int, num_bytes: int) -> np.ndarray:
  """Return the bytes (uint8) of process `source`; the `data` of the others is ignored."""
  is_source = jax.process_index() == source
  received = np.empty(num_bytes, np.uint8)
  for part in _chunks(num_bytes):
    chunk = np.empty_like(received[part])
    if is_source and data is not None:
      chunk = data[part]
    received[part] = multihost_utils.broadcast_one_to_all(chunk, is_source=is_source)
  return received


def shift_bytes(data: np.ndarray, num_bytes: int, distance: int) -> np.ndarray:
  """Return the bytes (uint8) of the process whose id is lower by `distance`, modulo their number.

  Args:
    data: the bytes of this process.
    num_bytes: how many are received.
    distance: between the two processes.
  """
  shift = _build_shift(distance)
  (device,) = shift.sharding.addressable_devices
  received = np.empty(num_bytes, np.uint8)
  longest = int(max(all_gather_object(max(data.size, num_bytes))))
  for part in _chunks(longest):
    own_part = data[part]
    row = np.zeros((1, part.stop - part.start), np.uint8)
    row[0, : own_part.size] = own_part
    rows = jax.make_array_from_single_device_arrays(
      shape=(jax.process_count(), row.size),
      sharding=shift.sharding,
      arrays=[jax.device_put(row, device)],
    )
    shifted = shift.function(rows)
    received_row = np.asarray(shifted.addressable_data(0))
    received[part] = received_row[0, : received[part].size]
  return received


class _Shift(NamedTuple):
  """A jitted shift of rows by some processes; each process has one row, on one device."""

  function: Callable[[jax.Array], jax.Array]
  sharding: NamedSharding


@functools.cache
def _build_shift(distance: int) -> _Shift:
  """Build the shift by `distance` processes."""
  num_processes = jax.process_count()
  first_device: dict[int, jax.Device] = {}
  for device in jax.devices():
    first_device.setdefault(device.process_index, device)
  devices = [first_device[process] for process in range(num_processes)]
  mesh = Mesh(np.array(devices), ("process",))
  spec = PartitionSpec("process")
  source_and_target = []
  for process in range(num_processes):
    source_and_target.append((process, (process + distance) % num_processes))

  def permute(row: jax.Array) -> jax.Array:
    return jax.lax.ppermute(row, "process", source_and_target)

  sharded = jax.shard_map(permute, mesh=mesh, in_specs=spec, out_specs=spec)
  return _Shift(jax.jit(sharded), NamedSharding(mesh, spec))


def _chunks(num_bytes: int) -> Iterator[slice]:
  """Yield slices of about _CHUNK_BYTES that cover `num_bytes`."""
  for low in range(0, num_bytes, _CHUNK_BYTES):
    yield slice(low, min(low + _CHUNK_BYTES, num_bytes))
