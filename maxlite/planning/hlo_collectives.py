"""The collectives of a compiled program: mesh axes, count and bytes."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from maxlite.planning.hlo import Computation, Instruction, Module

# Bytes that a device in a group of n sends per byte of payload with the best algorithm.
SENT_PER_BYTE = {
  "all-gather": lambda n: (n - 1) / n,
  "reduce-scatter": lambda n: (n - 1) / n,
  "all-reduce": lambda n: 2 * (n - 1) / n,
  "all-to-all": lambda n: (n - 1) / n,
  "ragged-all-to-all": lambda n: (n - 1) / n,
  "collective-permute": lambda n: 1.0,
  "collective-broadcast": lambda n: 1.0,
}


class Collective(NamedTuple):
  """All collectives of one kind over the same mesh axes, per device and step."""

  kind: str
  mesh_axes: tuple[str, ...]
  times: float
  payload_bytes: float  # of the operand; for an all-gather, of the result
  sent_bytes: float  # that a device sends over its links
  between_slices: bool = False  # over the data center network
  async_times: float = 0.0  # of `times`, those that other work may overlap

  @property
  def exposed_bytes(self) -> float:
    """Bytes sent by synchronous collectives, which no other work overlaps."""
    return self.sent_bytes * (1 - self.async_times / self.times)


def merge_collectives(found: Iterable[Collective]) -> list[Collective]:
  """Add up collectives of the same kind over the same mesh axes; sort them, largest first."""
  sums: dict[tuple, np.ndarray] = defaultdict(lambda: np.zeros(4))
  for c in found:
    total = c.times, c.payload_bytes, c.sent_bytes, c.async_times
    sums[c.kind, c.mesh_axes, c.between_slices] += total
  merged = [
    Collective(*key[:2], *map(float, total[:3]), key[2], float(total[3]))
    for key, total in sums.items()
  ]
  return sorted(merged, key=lambda collective: -collective.sent_bytes)


def collectives(
  module: Module, mesh_shape: Mapping[str, int], slices: Mapping[str, int] | None = None
) -> list[Collective]:
  """The collectives of one step, largest first; those in loops count once per iteration.

  Args:
    mesh_shape: the mesh, in whose order jit numbers the devices.
    slices: mesh axes that span slices -> number of slices along the axis.
  """
  found = []
  wrapped = {
    computation.name
    for _, i, _ in module.executed()
    if i.opcode == "async-start" or started_collective(module, i)
    for computation in module.called(i)
  }
  for computation, instruction, runs in module.executed():
    between_slices = _kind_between_slices(instruction) if slices else None
    kind = between_slices or _kind(computation, instruction)
    if not kind or (is_chained(instruction) and computation.name not in wrapped):
      continue
    if slices and between_slices:
      size, mesh_axes = prod(slices.values()), tuple(slices)
    else:
      groups = _groups(instruction, prod(mesh_shape.values()))
      size, mesh_axes = groups.shape[-1], _mesh_axes(groups, mesh_shape)
    if size > 1:
      payload = _payload_bytes(instruction.operands, kind, size)
      sent = payload * SENT_PER_BYTE[kind](size)
      total = (runs.times, runs.times * payload, runs.times * sent)
      is_async = instruction.opcode.endswith(("-start", "send")) or computation.name in wrapped
      times = runs.times * is_async
      found.append(Collective(kind, mesh_axes, *total, between_slices is not None, times))
  return merge_collectives(found)


def is_chained(instruction: Instruction) -> bool:
  """Whether XLA:TPU repeats the instruction in fusions that start, continue and finish it."""
  return "chain_id=" in instruction.attributes


def started_collective(module: Module, instruction: Instruction) -> Instruction | None:
  """The collective that a fusion starts, if it does, and that fusions with other work continue."""
  for computation in module.called(instruction) if instruction.opcode == "fusion" else ():
    inside = computation.instructions.values()
    if any('"AsyncCollectiveStart"' in i.attributes for i in inside):
      return next(filter(is_chained, inside))
  return None


def _kind(computation: Computation, instruction: Instruction) -> str | None:
  kind = instruction.opcode.removesuffix("-start")
  # XLA:TPU writes a reduce-scatter as a fusion of this name, an all-reduce and a slice.
  if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
    return "reduce-scatter"
  return kind if kind in SENT_PER_BYTE else None


def _kind_between_slices(instruction: Instruction) -> str | None:
  """The collective between slices that XLA:TPU implements as a send to the host, if any."""
  found = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.attributes)
  kind = found[1].lower().replace("_", "-") if found and instruction.opcode == "send" else None
  return kind if kind in SENT_PER_BYTE else None


def _payload_bytes(operands: Iterable[Instruction], kind: str, group_size: int) -> float:
  sizes = [operand.num_bytes for operand in operands if operand.opcode != "after-all"]
  if kind == "ragged-all-to-all":
    # The rows to send and the receive buffer, the larger of which is partly empty.
    return min(sizes[:2])
  if kind == "collective-permute":
    return sizes[0]
  return sum(sizes) * (group_size if kind == "all-gather" else 1)


def _groups(instruction: Instruction, num_devices: int) -> np.ndarray:
  """The devices of each group, a row per group."""
  text = instruction.attributes
  if listed := re.search(r"(?:source_target_pairs|replica_groups)=\{((?:\{[\d,]*\},?)+)\}", text):
    return np.array([group.split(",") for group in re.findall(r"\{([\d,]+)\}", listed[1])], int)
  if iota := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
    return _iota(*iota.groups()[1:]).reshape(_ints(iota[1]))
  if mesh := re.search(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}", text
  ):
    return _mesh_groups(*mesh.groups())
  return np.arange(num_devices)[None]


def _ints(text: str) -> list[int]:
  return [int(number) for number in re.findall(r"\d+", text)]


def _iota(dims: str, order: str | None) -> np.ndarray:
  """0, 1, ... reshaped to `dims`, transposed by `order` and flattened."""
  shape = _ints(dims)
  return np.arange(prod(shape)).reshape(shape).transpose(_ints(order) if order else None).ravel()


def _mesh_groups(axes: str, devices: str | None, grouped: str) -> np.ndarray:
  """Groups along the `grouped` axes ('a', or 'a':(3)2 for a part of one) of XLA's own mesh."""
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
  ids = np.array(_ints(devices)) if devices else np.arange(prod(sizes.values()))
  if devices and (iota := re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices)):
    ids = _iota(*iota.groups())
  parts = {
    name: (int(before or 1), int(size or sizes[name]))
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped)
  }
  shape: list[int] = []  # each axis as (before, part, after), of which `part` is in the groups
  for name, size in sizes.items():
    before, part = parts.get(name, (1, 1))
    shape += [before, part, size // (before * part)]
  axes = range(len(shape))
  grouped_last = [*(axis for axis in axes if axis % 3 != 1), *axes[1::3]]
  return ids.reshape(shape).transpose(grouped_last).reshape(-1, prod(shape[1::3]))


def _mesh_axes(groups: np.ndarray, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
  """Mesh axes along which the devices of a group differ."""
  coordinates = np.unravel_index(groups, tuple(mesh_shape.values()))
  by_axis = zip(mesh_shape, coordinates, strict=True)
  return tuple(axis for axis, at in by_axis if np.any(at != at[:, :1]))
