"""What the processes of a run send each other outside of its steps; all call each together."""

import functools
import json
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_PIECE_BYTES = 16 << 20  # of what is sent at once


def all_gather_object(value: Any) -> list[Any]:
  """The JSON values that all processes gave, in their order."""
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.asarray(text.size, np.int32))
  padded = np.zeros(1 << (int(sizes.max()) - 1).bit_length(), np.uint8)  # few shapes to compile
  padded[: text.size] = text
  texts = multihost_utils.process_allgather(padded)
  return [json.loads(each[:size].tobytes()) for each, size in zip(texts, sizes, strict=True)]


def broadcast_bytes(data: np.ndarray | None, source: int, num_bytes: int) -> np.ndarray:
  """The bytes (uint8) that process `source` has; what the others give is not looked at."""
  is_source = jax.process_index() == source
  received = np.empty(num_bytes, np.uint8)
  for part in _pieces(num_bytes):
    piece = data[part] if is_source and data is not None else np.empty_like(received[part])
    received[part] = multihost_utils.broadcast_one_to_all(piece, is_source=is_source)
  return received


def shift_bytes(data: np.ndarray, num_bytes: int, distance: int) -> np.ndarray:
  """The `num_bytes` bytes (uint8) that the process `distance` places before this one gave."""
  move, sharding = _shifting(distance)
  (device,) = sharding.addressable_devices
  received = np.empty(num_bytes, np.uint8)
  longest = int(max(all_gather_object(max(data.size, num_bytes))))
  for part in _pieces(longest):
    piece = np.zeros((1, part.stop - part.start), np.uint8)
    piece[0, : data[part].size] = data[part]
    shape = (jax.process_count(), piece.size)
    on_device = [jax.device_put(piece, device)]
    moved = move(jax.make_array_from_single_device_arrays(shape, sharding, on_device))
    received[part] = np.asarray(moved.addressable_data(0))[0, : received[part].size]
  return received


@functools.cache
def _shifting(distance: int) -> tuple[Any, NamedSharding]:
  """A program that moves rows on by so many processes, one row on a device of each."""
  count = jax.process_count()
  first = {device.process_index: device for device in reversed(jax.devices())}
  mesh = Mesh(np.array([first[process] for process in range(count)]), ("process",))
  spec = PartitionSpec("process")
  pairs = [(process, (process + distance) % count) for process in range(count)]
  send = lambda row: jax.lax.ppermute(row, "process", pairs)
  move = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=spec, out_specs=spec))
  return move, NamedSharding(mesh, spec)


def _pieces(num_bytes: int) -> Iterator[slice]:
  for number in range(math.ceil(num_bytes / _PIECE_BYTES)):
    low = number * _PIECE_BYTES
    yield slice(low, min(low + _PIECE_BYTES, num_bytes))
