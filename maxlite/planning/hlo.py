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
_CALLING = ("fusion", "call", "call-start", "async-start")


class Array(NamedTuple):
  """An array of an instruction's type.

  Attributes:
    dtype: XLA's name of the element type, such as bf16 or f8e4m3fn.
    shape: the dimensions; empty for a scalar.
    on_chip: whether it is in the memory next to the compute units (TPU: VMEM), not in HBM.
  """

  dtype: str
  shape: tuple[int, ...]
  on_chip: bool

  @property
  def num_bytes(self) -> float:
    return math.prod(self.shape) * _bytes_per_element(self.dtype)


def _bytes_per_element(dtype: str) -> float:
  """Bytes of an element; `pred` is a byte, a token nothing."""
  bits = re.search(r"\d+", dtype)
  if bits:
    return int(bits[0]) / 8
  if dtype == "pred":
    return 1.0
  return 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
  """`name = type opcode(operands), attributes`.

  Attributes:
    name: the name, which is unique in its computation.
    type: the type of the result: an array, or a tuple of arrays.
    opcode: the operation.
    operands: the instructions whose results it reads.
    literal: the text in place of operands: the value of a constant, the index of a parameter.
    attributes: the text after the operands.
    is_root: whether its result is that of its computation.
  """

  name: str
  type: str
  opcode: str
  operands: tuple["Instruction", ...]
  literal: str
  attributes: str
  is_root: bool

  @cached_property
  def arrays(self) -> list[Array]:
    """The arrays of its result; those of a tuple in order."""
    arrays: list[Array] = []
    for dtype, dims, layout in _ARRAY.findall(self.type):
      sizes = [int(size) for size in re.findall(r"\d+", dims)]
      arrays.append(Array(dtype, tuple(sizes), on_chip="S(" in layout))
    return arrays

  @property
  def num_bytes(self) -> float:
    """Bytes of its result."""
    return sum(array.num_bytes for array in self.arrays)

  def attribute(self, name: str) -> str:
    """The value of `name={...}` or `name=value`, without a leading %; "" if there is none."""
    found = re.search(rf"\b{name}=%?(\{{[^}}]*\}}|[^,\s]+)", self.attributes)
    if found is None:
      return ""
    return found[1]


@dataclasses.dataclass(frozen=True)
class Computation:
  """Instructions by name, operands before users."""

  name: str
  instructions: dict[str, Instruction]

  @property
  def root(self) -> Instruction:
    return next(each for each in self.instructions.values() if each.is_root)


class Executions(NamedTuple):
  """How often a computation runs in a step.

  Attributes:
    times: number of runs.
    fused: whether it is inside a fusion, so that its results are not written to memory.
  """

  times: float
  fused: bool


class _Callee(NamedTuple):
  """A computation that an instruction runs, and how often per execution of the instruction."""

  name: str
  times: float


@dataclasses.dataclass(frozen=True)
class Module:
  """A compiled program.

  Attributes:
    entry: name of the computation that runs first.
    computations: all computations, by name.
    sources: stack frame -> line of code.
    true_share: how often the true one of two branches runs; None if unknown.
    scope_shares: the same for conditionals in a named scope, by the scope's name.
    counts_loops: whether a loop's body counts once per iteration. If not, it counts once, as do all
      branches of a conditional.
  """

  entry: str
  computations: dict[str, Computation]
  sources: dict[int, str] = dataclasses.field(default_factory=dict)
  true_share: float | None = None
  scope_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
  counts_loops: bool = True

  @cached_property
  def runs(self) -> dict[str, Executions]:
    """How often each computation runs.

    Loops of unknown length count once, as do both branches without `true_share`. More than two
    branches run equally often.
    """
    runs: dict[str, Executions] = {}
    self._add_runs(runs, self.entry, times=1.0, fused=False)
    return runs

  def _add_runs(self, runs: dict[str, Executions], name: str, times: float, fused: bool) -> None:
    """Add `times` runs of the computation `name`, and those of all that it calls, to `runs`."""
    before = runs.get(name, Executions(0.0, fused))
    runs[name] = Executions(before.times + times, fused)
    for instruction in self.computations[name].instructions.values():
      is_fused = fused or instruction.opcode == "fusion"
      for callee in self._callees(instruction):
        self._add_runs(runs, callee.name, times * callee.times, is_fused)

  @cached_property
  def unknown_loops(self) -> int:
    """Number of loops whose length is not in the text."""
    unknown = 0
    for _, instruction, _ in self.executed():
      if instruction.opcode == "while" and self._trip_count(instruction) is None:
        unknown += 1
    return unknown

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
    if not frame:
      return ""
    return self.sources.get(int(frame), "")

  def called(self, instruction: Instruction) -> list[Computation]:
    """Computations that `instruction` calls as a whole, not once per element."""
    names = _CALLS.findall(instruction.attributes)
    for branches in _BRANCHES.findall(instruction.attributes):
      for name in branches.split(","):
        names.append(name.strip().lstrip("%"))
    return [self.computations[name] for name in names]

  def _callees(self, instruction: Instruction) -> list[_Callee]:
    """The computations that one execution of `instruction` runs."""
    if instruction.opcode == "while":
      trips = None
      if self.counts_loops:
        trips = self._trip_count(instruction)
      return [_Callee(instruction.attribute("body"), trips or 1.0)]
    if instruction.opcode == "conditional":
      return self._branches(instruction)
    if instruction.opcode in _CALLING:
      return [_Callee(computation.name, 1.0) for computation in self.called(instruction)]
    return []

  def _branches(self, conditional: Instruction) -> list[_Callee]:
    """The branches of a conditional and their shares of its executions."""
    names = [computation.name for computation in self.called(conditional)]
    if len(names) > 2 and self.counts_loops:
      return [_Callee(name, 1 / len(names)) for name in names]
    true_share = self._true_share(conditional)
    if true_share is None:
      return [_Callee(name, 1.0) for name in names]
    if "branch_computations" in conditional.attributes:  # listed by index: false, true
      false, true = names
    else:
      true, false = names
    return [_Callee(true, true_share), _Callee(false, 1.0 - true_share)]

  def _true_share(self, conditional: Instruction) -> float | None:
    """How often a conditional takes its true branch; None if unknown."""
    for scope, share in self.scope_shares.items():
      if scope in conditional.attributes:
        return share
    return self.true_share

  def _trip_count(self, loop: Instruction) -> float | None:
    """Iterations of a `while`, from its annotation or its condition `i < n`; None if unknown.

    XLA:TPU unrolls rings of collective-permutes, so i may grow by more than 1.
    """
    known = _KNOWN_TRIPS.search(loop.attributes)
    if known:
      return float(known[1])
    compare = self.computations[loop.attribute("condition")].root
    if compare.opcode != "compare" or compare.attribute("direction") != "LT":
      return None
    counter, limit = compare.operands
    stop = _constant(limit)
    if counter.opcode != "get-tuple-element" or stop is None:
      return None
    index = int(counter.attribute("index") or 0)
    start = _initial(loop, index)
    step = _increment(self.computations[loop.attribute("body")], index)
    return float(math.ceil((stop - start) / step))


def parse(
  text: str,
  true_share: float | None = None,
  scope_shares: Mapping[str, float] | None = None,
  package_folder: str = _PACKAGE_FOLDER,
) -> Module:
  """Parse the output of `jax.stages.Compiled.as_text`.

  Args:
    text: the program.
    true_share: the share of conditionals as in `Module`.
    scope_shares: the shares of conditionals in named scopes as in `Module`.
    package_folder: lines of files in it are sources of instructions.
  """
  computations: dict[str, Computation] = {}
  current: dict[str, Instruction] = {}
  entry = ""
  for line in text.splitlines():
    header = _HEADER.match(line)
    named = _NAMED.match(line)
    if header:
      name = header[2]
      current = {}
      computations[name] = Computation(name, current)
      if header[1]:
        entry = name
    elif named:
      name = named[2]
      current[name] = _parse_instruction(
        name=name,
        rest=line[named.end() :],
        before=current,
        is_root=bool(named[1]),
      )
  return Module(
    entry=entry,
    computations=computations,
    sources=_sources(text, package_folder),
    true_share=true_share,
    scope_shares=scope_shares or {},
  )


def _sources(text: str, package_folder: str) -> dict[int, str]:
  """Stack frame -> its innermost line in the package, from the tables before the computations."""
  files: dict[int, str] = {}
  locations: dict[int, str] = {}
  frames: dict[int, str] = {}
  tables = {"FileNames": files, "FileLocations": locations, "StackFrames": frames}
  table: dict[int, str] = {}
  for line in text.partition("{\n  ")[0].splitlines():
    row = re.match(r"(\d+) (.*)", line)
    if row:
      table[int(row[1])] = row[2]
    else:
      table = tables.get(line, {})
  sources: dict[int, str] = {}
  for frame, row_text in frames.items():  # parents come first
    location = locations[_number(row_text, "file_location_id")]
    path = os.path.abspath(files[_number(location, "file_name_id")].strip('"'))
    found = path.startswith(f"{package_folder}/")
    if found:
      inside = path.removeprefix(f"{package_folder}/")
      sources[frame] = f"{inside}:{_number(location, 'line')}"
    else:
      # Numbers of parents are one too high: that of the first frame, which has none, is 1.
      offset = _number(frames[1], "parent_frame_id")
      parent = _number(row_text, "parent_frame_id") - offset
      sources[frame] = sources.get(parent, "")
  return sources


def _number(row: str, name: str) -> int:
  """The number in `name=number` of a row of a table."""
  return int(re.findall(rf"\b{name}=(\d+)", row)[0])


def _parse_instruction(
  name: str, rest: str, before: dict[str, Instruction], is_root: bool
) -> Instruction:
  """Parse the line of an instruction.

  Args:
    name: the name of the instruction.
    rest: the line after `name = `.
    before: the earlier instructions of the computation, by name.
    is_root: whether the line begins with ROOT.
  """
  type_end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
  operation = rest[type_end:].lstrip()
  opening = operation.index("(")
  closing = _closing(operation, opening)
  opcode = operation[:opening]
  inside = operation[opening + 1 : closing - 1]
  literal = ""
  operands: list[Instruction] = []
  if opcode in ("constant", "parameter"):
    literal = inside
  else:
    operands = [before[operand] for operand in _NAME.findall(inside)]
  return Instruction(
    name=name,
    type=rest[:type_end],
    opcode=opcode,
    operands=tuple(operands),
    literal=literal,
    attributes=operation[closing:],
    is_root=is_root,
  )


def _closing(text: str, opening: int) -> int:
  """The position after the parenthesis that closes the one at `opening`."""
  depth = 0
  for position in re.finditer(r"[()]", text[opening:]):
    if position[0] == "(":
      depth += 1
    else:
      depth -= 1
    if depth == 0:
      return opening + position.end()
  raise ValueError(f"not a line of HLO: {text[:80]}")


def _initial(loop: Instruction, index: int) -> float:
  """The initial value of a loop's counter, element `index` of its tuple; 0 if unknown."""
  (initial,) = loop.operands
  start = initial
  if initial.opcode == "tuple":
    start = initial.operands[index]
  while start.opcode in ("copy", "bitcast"):
    (start,) = start.operands
  return _constant(start) or 0.0


def _increment(body: Computation, index: int) -> float:
  """The increment per iteration of a loop's counter, element `index` of its tuple."""
  if body.root.opcode != "tuple":
    return 1.0
  counter = body.root.operands[index]
  increment = 0.0
  while counter.opcode in ("add", "copy"):
    variables: list[Instruction] = []
    for addend in counter.operands:
      increment += _constant(addend) or 0.0
      if addend.opcode != "constant":
        variables.append(addend)
    counter = variables[0] if variables else counter.operands[0]
  return increment or 1.0


def _constant(instruction: Instruction) -> float | None:
  """The value of a constant whole number; None for other instructions."""
  if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.literal):
    return float(instruction.literal)
  return None
