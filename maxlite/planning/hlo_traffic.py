"""HBM bytes that one step of a compiled program moves on a device, by instruction."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from maxlite.planning.hlo import Array, Computation, Instruction, Module
from maxlite.planning.hlo_collectives import SENT_PER_BYTE, is_chained, started_collective
from maxlite.planning.hlo_cost import filled_shares, is_kernel, kernel_cost, share_of_kernel

_ALLOCATION = re.compile(r'custom_call_target="(?:AllocateBuffer|CreateBuffer)"')
# Nothing is moved: the result is an operand, or is counted elsewhere.
_FREE = re.compile(
  "parameter|constant|tuple|get-tuple-element|bitcast|while|conditional|call|"
  "(async|call)-(start|update)|after-all|add-dependency|opt-barrier|partition-id|.*-done"
)
_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = ("dynamic-update-slice", "scatter")
_VIEWS = ("bitcast", "reshape")
_MATMULS = ("dot", "convolution")
# Categories by the operations that a fusion may contain, the most significant first.
_CATEGORIES = {
  "matmuls": _MATMULS,
  "gathers and scatters": ("gather", "scatter"),
  "slices and updates": _SLICES + _UPDATES,
}
_MOVES = ("copy", "reshape", "transpose", "bitcast-convert", "broadcast", "pad", "concatenate")


class Traffic(NamedTuple):
  """Bytes that one instruction moves in a step.

  Attributes:
    num_bytes: bytes read and written, over all executions.
    category: "matmuls", "collectives", "kernels", "copies" or another kind of work.
    source: the line of code that it is from; "" if unknown.
  """

  num_bytes: float
  category: str
  source: str


def hbm_traffic(module: Module) -> list[Traffic]:
  """Bytes read from and written to HBM by the instructions of one step of one device.

  Each instruction reads its operands and writes its result once. Slices and in-place updates count
  the slice only, and kernels the rows that `matmul_flops` counts. Arrays in on-chip memory do not
  count. Asynchronous operations count where they start.

  XLA's cost analysis gives one sum for the program, with the bodies of loops once, so it cannot be
  scaled by their lengths. `Module.with_loops_once` counts in the same way, to compare the two.
  """
  filled = filled_shares(module)
  traffic: list[Traffic] = []
  for _, instruction, runs in module.executed():
    if not runs.fused and not _is_free(instruction):
      moved = started_collective(module, instruction) or instruction
      part = Traffic(
        num_bytes=runs.times * _bytes_moved(module, moved, filled),
        category=_category(module, moved),
        source=module.source(instruction),
      )
      traffic.append(part)
  return traffic


def largest_traffic(
  traffic: Iterable[Traffic], key: Callable[[Traffic], str]
) -> list[tuple[str, float]]:
  """(name, bytes) of the groups of instructions with the same `key`, largest first."""
  sums: dict[str, float] = defaultdict(float)
  for part in traffic:
    sums[key(part)] += part.num_bytes
  return sorted(sums.items(), key=lambda named: -named[1])


def _is_free(instruction: Instruction) -> bool:
  """Whether the instruction moves no bytes, or only those that other instructions count."""
  if _FREE.fullmatch(instruction.opcode):
    return True
  return _ALLOCATION.search(instruction.attributes) is not None


def _category(module: Module, instruction: Instruction) -> str:
  opcode = instruction.opcode.removesuffix("-start")
  if opcode in SENT_PER_BYTE:
    return "collectives"
  if is_kernel(instruction):
    return "kernels"
  opcodes = {opcode}
  if opcode == "fusion":
    (fused,) = module.called(instruction)
    opcodes = {each.opcode for each in fused.instructions.values()}
  for category, members in _CATEGORIES.items():
    if opcodes.intersection(members):
      return category
  if opcode in _MOVES:
    return "copies"
  return "element-wise"


def _bytes_moved(module: Module, instruction: Instruction, filled: dict[int, float]) -> float:
  """Bytes that one execution of an instruction reads and writes in HBM."""
  operands = instruction.operands
  opcode = instruction.opcode.removesuffix("-start")
  written = _in_hbm(_results(instruction))
  cost = kernel_cost(instruction)
  if cost is not None:
    return cost.row_bytes * share_of_kernel(instruction, filled) + cost.fixed_bytes
  if opcode == "fusion":
    return _bytes_moved_by_fusion(module, instruction)
  if opcode in _SLICES:
    read = 0.0
    if not operands[0].arrays[0].on_chip:
      read = sum(array.num_bytes for array in _results(instruction))
    return written + read
  if opcode in _UPDATES:
    return 2 * sum(_in_hbm(operand.arrays) for operand in operands[1:])
  if opcode == "ragged-all-to-all":
    # The rest of the larger side is empty.
    return 2 * min(_in_hbm(operand.arrays) for operand in operands[:2])
  return sum(_in_hbm(operand.arrays) for operand in operands) + written


def _bytes_moved_by_fusion(module: Module, fusion: Instruction) -> float:
  """Bytes that a fusion reads of its operands and writes of its result."""
  (fused,) = module.called(fusion)
  read = 0.0
  for index, operand in enumerate(fusion.operands):
    read += _share_read(module, fused, index) * _in_hbm(operand.arrays)
  # The rest of the result is updated in place.
  result_bytes = fused.root.num_bytes or 1
  written = _in_hbm(_results(fusion))
  return read + written * _bytes_written(module, fused.root) / result_bytes


def _results(instruction: Instruction) -> list[Array]:
  """The arrays that an instruction writes.

  The type of an asynchronous start has, besides, its operands and scalars that signal its progress:
  before the result, except of a copy.
  """
  arrays = instruction.arrays
  num_operands = len(instruction.operands)
  if instruction.opcode == "copy-start":
    return arrays[:1]
  if instruction.opcode.endswith("-start"):
    return arrays[num_operands : 2 * num_operands]
  return arrays


def _in_hbm(arrays: Iterable[Array]) -> float:
  return sum(array.num_bytes for array in arrays if not array.on_chip)


def _share_read(module: Module, fused: Computation, index: int) -> float:
  """The share of operand `index` of a fusion that is read."""
  parameter = _parameter(fused, index)
  used = sum(_bytes_used(module, fused, parameter))
  whole = parameter.num_bytes or 1
  return min(used / whole, 1.0)


def _parameter(fused: Computation, index: int) -> Instruction:
  """The parameter with this index of a computation."""
  for instruction in fused.instructions.values():
    if instruction.opcode == "parameter" and instruction.literal == str(index):
      return instruction
  raise ValueError(f"{fused.name} has no parameter {index}")


def _bytes_used(module: Module, fused: Computation, value: Instruction) -> list[float]:
  """Bytes of `value` that each of its users in a fusion reads."""
  used: list[float] = []
  for user in fused.instructions.values():
    if value not in user.operands:
      continue
    is_sliced = user.operands[0] is value
    if user.opcode in _VIEWS:
      used += _bytes_used(module, fused, user)
    elif user.opcode == "convert":  # computed only for what its users read
      share = value.num_bytes / (user.num_bytes or 1)
      used += [share * num_bytes for num_bytes in _bytes_used(module, fused, user)]
    elif user.opcode == "fusion":
      used += _bytes_used_by_fusion(module, fused, value, user)
    elif is_sliced and user.opcode in _SLICES:
      used.append(user.num_bytes)
    elif is_sliced and user.opcode == "dynamic-update-slice":
      continue  # updated in place
    elif not _is_passed_on(user):
      used.append(value.num_bytes)
  return used


def _bytes_used_by_fusion(
  module: Module, fused: Computation, value: Instruction, fusion: Instruction
) -> list[float]:
  """Bytes of `value` that each instruction in a fusion nested in `fused` reads."""
  used: list[float] = []
  (nested,) = module.called(fusion)
  for index, operand in enumerate(fusion.operands):
    if operand is value:
      parameter = _parameter(nested, index)
      used += _bytes_used(module, nested, parameter)
      if _origin(module, nested.root) is parameter:  # the users of the result read it
        used += _bytes_used(module, fused, fusion)
  return used


def _origin(module: Module, part: Instruction) -> Instruction:
  """The instruction whose result `part` is, as it is or viewed with another shape."""
  if part.opcode in _VIEWS:
    return _origin(module, part.operands[0])
  if part.opcode == "fusion":
    (nested,) = module.called(part)
    origin = _origin(module, nested.root)
    if origin.opcode == "parameter":
      return _origin(module, part.operands[int(origin.literal)])
  return part


def _is_passed_on(part: Instruction) -> bool:
  """Whether a fusion returns operands in place, or continues a collective that another started."""
  return part.opcode == "tuple" or is_chained(part) or "AsyncCollectiveDone" in part.attributes


def _bytes_written(module: Module, part: Instruction) -> float:
  """Bytes of `part`, an instruction of a fusion, that the fusion writes."""
  if part.opcode == "tuple":
    return sum(_bytes_written(module, operand) for operand in part.operands)
  if part.opcode == "parameter" or _is_passed_on(part):
    return 0.0
  if part.opcode in _VIEWS:
    return _bytes_written(module, part.operands[0])
  if part.opcode == "fusion":
    return _bytes_written(module, module.called(part)[0].root)
  if part.opcode == "dynamic-update-slice":
    return part.operands[1].num_bytes
  return part.num_bytes
