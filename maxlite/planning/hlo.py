"""Parser of HLO text: instructions, and how often each computation runs."""

import dataclasses
import math
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HEADER = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_NAMED = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLS = re.compile(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.-]+)")
_NAME = re.compile(r"%([\w.-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CALLING = ("fusion", "call", "call-start", "async-start", "conditional")


class Array(NamedTuple):
  """An array of an instruction's type."""

  dtype: str
  shape: tuple[int, ...]
  on_chip: bool  # in the memory next to the compute units (TPU: VMEM), not in HBM

  @property
  def num_bytes(self) -> float:
    bits = re.search(r"\d+", self.dtype)  # bf16, f8e4m3fn; `pred` is a byte, a token nothing
    per_element = int(bits[0]) / 8 if bits else float(self.dtype == "pred")
    return math.prod(self.shape) * per_element


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """`name = type opcode(operands), attributes`."""

  name: str
  type: str
  opcode: str
  operands: tuple["Instruction", ...]
  literal: str  # in place of operands, of a constant or parameter
  attributes: str
  is_root: bool

  @cached_property
  def arrays(self) -> list[Array]:
    """The arrays of its result; of a tuple, in order."""
    found = _ARRAY.findall(self.type)
    shape = lambda dims: tuple(map(int, re.findall(r"\d+", dims)))
    return [Array(dtype, shape(dims), "S(" in layout) for dtype, dims, layout in found]

  @property
  def num_bytes(self) -> float:
    return sum(array.num_bytes for array in self.arrays)

  def attribute(self, name: str) -> str:
    """The value of `name={...}` or `name=value`, without a leading %; "" if there is none."""
    found = re.search(rf"\b{name}=%?(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
    return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
  """Instructions by name, operands before users."""

  name: str
  instructions: dict[str, Instruction]

  @property
  def root(self) -> Instruction:
    return next(i for i in self.instructions.values() if i.is_root)


class Executions(NamedTuple):
  """How often a computation runs in a step."""

  times: float
  fused: bool  # inside a fusion, so that its results are not written to memory


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program."""

  entry: str
  computations: dict[str, Computation]
  sources: dict[int, str] = dataclasses.field(default_factory=dict)  # stack frame -> line of code
  true_share: float | None = None  # how often one of two branches, the true one, runs, if known
  scope_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)  # in a named scope
  counts_loops: bool = True  # False: a loop's body and all branches run once

  @cached_property
  def runs(self) -> dict[str, Executions]:
    """How often each computation runs; loops of unknown length count once, as do both branches
    without `true_share`. More than two branches run equally often."""
    runs: dict[str, Executions] = {}

    def visit(name: str, times: float, fused: bool) -> None:
      before = runs.get(name, Executions(0.0, fused))
      runs[name] = Executions(before.times + times, fused)
      for instruction in self.computations[name].instructions.values():
        for callee, per_run in self._callees(instruction):
          visit(callee, times * per_run, fused or instruction.opcode == "fusion")

    visit(self.entry, 1.0, False)
    return runs

  @cached_property
  def unknown_loops(self) -> int:
    """Number of loops whose length is not in the text."""
    loops = (instruction for _, instruction, _ in self.executed() if instruction.opcode == "while")
    return sum(self._trip_count(loop) is None for loop in loops)

  def with_loops_once(self) -> "Module":
    """The program as XLA's cost analysis counts it: loop bodies and all branches once."""
    return dataclasses.replace(self, true_share=None, scope_shares={}, counts_loops=False)

  def executed(self) -> Iterator[tuple[Computation, Instruction, Executions]]:
    """Yield every instruction that runs."""
    for name, runs in self.runs.items():
      for instruction in self.computations[name].instructions.values():
        yield self.computations[name], instruction, runs

  def source(self, instruction: Instruction) -> str:
    """The innermost line of this package that `instruction` is from; "" if there is none."""
    frame = instruction.attribute("stack_frame_id").rstrip("}")
    return self.sources.get(int(frame), "") if frame else ""

  def called(self, instruction: Instruction) -> list[Computation]:
    """Computations that `instruction` calls as a whole, not once per element."""
    names = _CALLS.findall(instruction.attributes)
    for branches in _BRANCHES.findall(instruction.attributes):
      names += [name.strip().lstrip("%") for name in branches.split(",")]
    return [self.computations[name] for name in names]

  def _callees(self, instruction: Instruction) -> list[tuple[str, float]]:
    if instruction.opcode == "while":
      trips = self._trip_count(instruction) if self.counts_loops else None
      return [(instruction.attribute("body"), trips or 1.0)]
    if instruction.opcode in _CALLING:
      names = [computation.name for computation in self.called(instruction)]
      if instruction.opcode == "conditional" and len(names) > 2 and self.counts_loops:
        return [(name, 1 / len(names)) for name in names]
      shares = (x for scope, x in self.scope_shares.items() if scope in instruction.attributes)
      share = next(shares, self.true_share)
      if instruction.opcode != "conditional" or share is None:
        return [(name, 1.0) for name in names]
      is_indexed = "branch_computations" in instruction.attributes  # in the order false, true
      true, false = reversed(names) if is_indexed else names
      return [(true, share), (false, 1.0 - share)]
    return []

  def _trip_count(self, loop: Instruction) -> float | None:
    """Iterations of a `while`, from its annotation or its condition `i < n`; None if unknown.

    XLA:TPU unrolls rings of collective-permutes, so i may grow by more than 1.
    """
    if known := _KNOWN_TRIPS.search(loop.attributes):
      return float(known[1])
    compare = self.computations[loop.attribute("condition")].root
    if compare.opcode != "compare" or compare.attribute("direction") != "LT":
      return None
    counter, limit = compare.operands
    stop = _constant(limit)
    if counter.opcode != "get-tuple-element" or stop is None:
      return None
    index = int(counter.attribute("index") or 0)
    (initial,) = loop.operands
    start = initial.operands[index] if initial.opcode == "tuple" else initial
    while start.opcode in ("copy", "bitcast"):
      (start,) = start.operands
    step = _step(self.computations[loop.attribute("body")], index)
    return float(math.ceil((stop - (_constant(start) or 0)) / step))


def parse(
  text: str,
  true_share: float | None = None,
  scope_shares: Mapping[str, float] | None = None,
  package_folder: str = _PACKAGE_FOLDER,
) -> Module:
  """Parse the output of `jax.stages.Compiled.as_text`; shares of conditionals as in `Module`.

  Args:
    package_folder: lines of files in it are sources of instructions.
  """
  computations: dict[str, Computation] = {}
  current: dict[str, Instruction] = {}
  entry = ""
  for line in text.splitlines():
    if header := _HEADER.match(line):
      current = {}
      computations[header[2]] = Computation(header[2], current)
      entry = header[2] if header[1] else entry
    elif named := _NAMED.match(line):
      current[named[2]] = _instruction(named, line[named.end() :], current)
  sources = _sources(text, package_folder)
  return Module(entry, computations, sources, true_share, scope_shares or {})


def _sources(text: str, package_folder: str) -> dict[int, str]:
  """Stack frame -> its innermost line in the package, from the tables before the computations."""
  tables: dict[str, dict[int, str]] = {"FileNames": {}, "FileLocations": {}, "StackFrames": {}}
  table: dict[int, str] = {}
  for line in text.partition("{\n  ")[0].splitlines():
    if row := re.match(r"(\d+) (.*)", line):
      table[int(row[1])] = row[2]
    else:
      table = tables.get(line, {})
  number = lambda row, name: int(re.findall(rf"\b{name}=(\d+)", row)[0])
  files, locations, frames = tables.values()
  sources: dict[int, str] = {}
  for frame, row in frames.items():  # parents come first
    location = locations[number(row, "file_location_id")]
    path = os.path.abspath(files[number(location, "file_name_id")].strip('"'))
    found = path.startswith(f"{package_folder}/")
    inside = path.removeprefix(f"{package_folder}/")
    # Numbers of parents are one too high: that of the first frame, which has none, is 1.
    parent = number(row, "parent_frame_id") - number(frames[1], "parent_frame_id")
    sources[frame] = f"{inside}:{number(location, 'line')}" if found else sources.get(parent, "")
  return sources


def _instruction(named: re.Match[str], rest: str, before: dict[str, Instruction]) -> Instruction:
  end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
  type_, rest = rest[:end], rest[end:].lstrip()
  opening = rest.index("(")
  closing = _closing(rest, opening)
  inside = rest[opening + 1 : closing - 1]
  opcode = rest[:opening]
  literal = inside if opcode in ("constant", "parameter") else ""
  operands = () if literal else tuple(before[name] for name in _NAME.findall(inside))
  return Instruction(named[2], type_, opcode, operands, literal, rest[closing:], bool(named[1]))


def _closing(text: str, opening: int) -> int:
  """The position after the parenthesis that closes the one at `opening`."""
  depth = 0
  for position in re.finditer(r"[()]", text[opening:]):
    depth += 1 if position[0] == "(" else -1
    if depth == 0:
      return opening + position.end()
  raise ValueError(f"not a line of HLO: {text[:80]}")


def _step(body: Computation, index: int) -> float:
  """The increment per iteration of a loop's counter, element `index` of its tuple."""
  if body.root.opcode != "tuple":
    return 1.0
  counter, step = body.root.operands[index], 0.0
  while counter.opcode in ("add", "copy"):
    step += sum(_constant(addend) or 0.0 for addend in counter.operands)
    counter = next((a for a in counter.operands if a.opcode != "constant"), counter.operands[0])
  return step or 1.0


def _constant(instruction: Instruction) -> float | None:
  is_number = instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal)
  return float(instruction.literal) if is_number else None
