"""The collectives of a compiled program: mesh axes, count and bytes."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from maxlite.planning.hlo import Computation, Executions, Instruction, Module

_MEGASCALE_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
# The three notations of device groups.
_LISTED_GROUPS = re.compile(r"(?:source_target_pairs|replica_groups)=\{((?:\{[\d,]*\},?)+)\}")
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
  r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}"
)


def _all_but_own_part(group_size: int) -> float:
  return (group_size - 1) / group_size


def _all_but_own_part_twice(group_size: int) -> float:
  return 2 * (group_size - 1) / group_size


def _everything(group_size: int) -> float:
  del group_size
  return 1.0


# Bytes that a device sends per byte of payload with the best algorithm, from the group's size.
SENT_PER_BYTE: dict[str, Callable[[int], float]] = {
  "all-gather": _all_but_own_part,
  "reduce-scatter": _all_but_own_part,
  "all-reduce": _all_but_own_part_twice,
  "all-to-all": _all_but_own_part,
  "ragged-all-to-all": _all_but_own_part,
  "collective-permute": _everything,
  "collective-broadcast": _everything,
}


class Collective(NamedTuple):
  """All collectives of one kind over the same mesh axes, per device and step.

  Attributes:
    kind: a key of `SENT_PER_BYTE`.
    mesh_axes: the mesh axes along which the devices of a group differ.
    times: executions per step.
    payload_bytes: bytes of the operands; of the results for an all-gather.
    sent_bytes: bytes that a device sends over its links.
    between_slices: whether the bytes cross the data center network.
    async_times: how many of `times` other work may overlap.
  """

  kind: str
  mesh_axes: tuple[str, ...]
  times: float
  payload_bytes: float
  sent_bytes: float
  between_slices: bool = False
  async_times: float = 0.0

  @property
  def exposed_bytes(self) -> float:
    """Bytes sent by synchronous collectives, which no other work overlaps."""
    return self.sent_bytes * (1 - self.async_times / self.times)


class _Group(NamedTuple):
  """The devices of a collective."""

  size: int
  mesh_axes: tuple[str, ...]


def merge_collectives(found: Iterable[Collective]) -> list[Collective]:
  """Add up collectives of the same kind over the same mesh axes; sort them, largest first."""
  merged: dict[tuple[str, tuple[str, ...], bool], Collective] = {}
  for collective in found:
    key = (collective.kind, collective.mesh_axes, collective.between_slices)
    if key in merged:
      merged[key] = _sum(merged[key], collective)
    else:
      merged[key] = collective
  return sorted(merged.values(), key=lambda collective: -collective.sent_bytes)


def _sum(one: Collective, other: Collective) -> Collective:
  return one._replace(
    times=one.times + other.times,
    payload_bytes=one.payload_bytes + other.payload_bytes,
    sent_bytes=one.sent_bytes + other.sent_bytes,
    async_times=one.async_times + other.async_times,
  )


def collectives(
  module: Module, mesh_shape: Mapping[str, int], slices: Mapping[str, int] | None = None
) -> list[Collective]:
  """The collectives of one step, largest first; those in loops count once per iteration.

  Args:
    module: the compiled program.
    mesh_shape: the mesh, in whose order jit numbers the devices.
    slices: mesh axes that span slices -> number of slices along the axis.
  """
  search = _Search(module, mesh_shape, slices or {}, _started_computations(module))
  found: list[Collective] = []
  for computation, instruction, runs in module.executed():
    collective = search.read(computation, instruction, runs)
    if collective is not None:
      found.append(collective)
  return merge_collectives(found)


@dataclasses.dataclass(frozen=True)
class _Search:
  """Reads collectives from instructions.

  Attributes:
    module: the compiled program.
    mesh_shape: the mesh, in whose order jit numbers the devices.
    slices: mesh axes that span slices -> number of slices along the axis.
    started: names of the computations that an asynchronous instruction starts.
  """

  module: Module
  mesh_shape: Mapping[str, int]
  slices: Mapping[str, int]
  started: set[str]

  def read(
    self, computation: Computation, instruction: Instruction, runs: Executions
  ) -> Collective | None:
    """The collective of `instruction`, over all its executions; None if it sends nothing."""
    kind_between_slices = None
    if self.slices:
      kind_between_slices = _kind_between_slices(instruction)
    kind = kind_between_slices or _kind(computation, instruction)
    if not kind or (is_chained(instruction) and computation.name not in self.started):
      return None
    if kind_between_slices:
      group = _Group(prod(self.slices.values()), tuple(self.slices))
    else:
      group = self._group(instruction)
    if group.size <= 1:
      return None
    payload = _payload_bytes(instruction.operands, kind, group.size)
    sent = payload * SENT_PER_BYTE[kind](group.size)
    async_times = 0.0
    if instruction.opcode.endswith(("-start", "send")) or computation.name in self.started:
      async_times = runs.times
    return Collective(
      kind=kind,
      mesh_axes=group.mesh_axes,
      times=runs.times,
      payload_bytes=runs.times * payload,
      sent_bytes=runs.times * sent,
      between_slices=kind_between_slices is not None,
      async_times=async_times,
    )

  def _group(self, instruction: Instruction) -> _Group:
    num_devices = prod(self.mesh_shape.values())
    groups = _groups(instruction, num_devices)
    return _Group(groups.shape[-1], _mesh_axes(groups, self.mesh_shape))


def _started_computations(module: Module) -> set[str]:
  """Names of the computations that asynchronous instructions and fusions start."""
  started: set[str] = set()
  for _, instruction, _ in module.executed():
    if instruction.opcode == "async-start" or started_collective(module, instruction):
      for computation in module.called(instruction):
        started.add(computation.name)
  return started


def is_chained(instruction: Instruction) -> bool:
  """Whether XLA:TPU repeats the instruction in fusions that start, continue and finish it."""
  return "chain_id=" in instruction.attributes


def started_collective(module: Module, instruction: Instruction) -> Instruction | None:
  """The collective that a fusion starts, if it does, and that fusions with other work continue."""
  if instruction.opcode != "fusion":
    return None
  for computation in module.called(instruction):
    inside = computation.instructions.values()
    if any('"AsyncCollectiveStart"' in each.attributes for each in inside):
      return next(filter(is_chained, inside))
  return None


def _kind(computation: Computation, instruction: Instruction) -> str | None:
  """The kind of collective that `instruction` is; None for other instructions."""
  kind = instruction.opcode.removesuffix("-start")
  # XLA:TPU writes a reduce-scatter as a fusion of this name, an all-reduce and a slice.
  if kind == "all-reduce" and computation.name.startswith("all-reduce-scatter"):
    return "reduce-scatter"
  if kind in SENT_PER_BYTE:
    return kind
  return None


def _kind_between_slices(instruction: Instruction) -> str | None:
  """The collective between slices that XLA:TPU implements as a send to the host, if any."""
  if instruction.opcode != "send":
    return None
  transfer = _MEGASCALE_TRANSFER.search(instruction.attributes)
  if transfer is None:
    return None
  kind = transfer[1].lower().replace("_", "-")
  if kind in SENT_PER_BYTE:
    return kind
  return None


def _payload_bytes(operands: Iterable[Instruction], kind: str, group_size: int) -> float:
  """Bytes of one execution; see `Collective.payload_bytes`."""
  sizes = [operand.num_bytes for operand in operands if operand.opcode != "after-all"]
  if kind == "ragged-all-to-all":
    # The rows to send and the receive buffer, the larger of which is partly empty.
    return min(sizes[:2])
  if kind == "collective-permute":
    return sizes[0]
  if kind == "all-gather":
    return sum(sizes) * group_size
  return sum(sizes)


def _groups(instruction: Instruction, num_devices: int) -> np.ndarray:
  """The devices of each group, a row per group."""
  listed = _LISTED_GROUPS.search(instruction.attributes)
  if listed:
    groups = re.findall(r"\{([\d,]+)\}", listed[1])
    return np.array([_ints(group) for group in groups], int)
  iota = _IOTA_GROUPS.search(instruction.attributes)
  if iota:
    devices = _iota(_ints(iota[2]), _ints(iota[3] or ""))
    return devices.reshape(_ints(iota[1]))
  mesh = _MESH_GROUPS.search(instruction.attributes)
  if mesh:
    return _mesh_groups(axes=mesh[1], devices=mesh[2] or "", grouped=mesh[3])
  return np.arange(num_devices)[None]


def _ints(text: str) -> list[int]:
  return [int(number) for number in re.findall(r"\d+", text)]


def _iota(dims: Sequence[int], order: Sequence[int]) -> np.ndarray:
  """0, 1, ... reshaped to `dims`, transposed by `order`, or not if it is empty, and flattened."""
  numbers = np.arange(prod(dims)).reshape(dims)
  if order:
    numbers = numbers.transpose(order)
  return numbers.ravel()


def _mesh_groups(axes: str, devices: str, grouped: str) -> np.ndarray:
  """The devices of each group along some axes of XLA's own mesh.

  Args:
    axes: names and sizes of the mesh axes: 'a'=2, 'b'=4.
    devices: the devices in the order of the mesh, as a list or an iota; "" for 0, 1, ...
    grouped: the axes along which the devices of a group differ: 'a', or 'a':(3)2 for a part of one
      that has 2 elements and is preceded by one of 3.
  """
  sizes: dict[str, int] = {}
  for name, size in re.findall(r"'([^']+)'=(\d+)", axes):
    sizes[name] = int(size)
  parts: dict[str, tuple[int, int]] = {}
  for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped):
    parts[name] = (int(before or 1), int(part or sizes[name]))
  shape: list[int] = []  # each axis as (before, part, after), of which `part` is in the groups
  for name, size in sizes.items():
    before, part = parts.get(name, (1, 1))
    after = size // (before * part)
    shape += [before, part, after]
  indices = list(range(len(shape)))
  within_group = indices[1::3]
  between_groups = [index for index in indices if index not in within_group]
  order = between_groups + within_group
  ids = _mesh_devices(devices, prod(shape)).reshape(shape).transpose(order)
  return ids.reshape(-1, prod(shape[1::3]))


def _mesh_devices(devices: str, num_devices: int) -> np.ndarray:
  """The devices in the order of XLA's own mesh; see `_mesh_groups`."""
  if not devices:
    return np.arange(num_devices)
  iota = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", devices)
  if iota:
    return _iota(_ints(iota[1]), _ints(iota[2] or ""))
  return np.array(_ints(devices))


def _mesh_axes(groups: np.ndarray, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
  """Mesh axes along which the devices of a group differ."""
  coordinates = np.unravel_index(groups, tuple(mesh_shape.values()))
  mesh_axes: list[str] = []
  for axis, coordinate in zip(mesh_shape, coordinates, strict=True):
    if np.any(coordinate != coordinate[:, :1]):
      mesh_axes.append(axis)
  return tuple(mesh_axes)
