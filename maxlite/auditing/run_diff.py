"""Finds where two runs or checkpoints that should be equal differ first, and what may cause it."""

import dataclasses
import fnmatch
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from maxlite.checkpoint.manager import PARAMS, Checkpoints
from maxlite.checkpoint.manifest import Manifest
from maxlite.checkpoint.parameters import StoredParameters
from maxlite.checkpoint.run_folder import RunFolder, step_of
from maxlite.config.raw_values import show
from maxlite.config.saved import MACHINE_KEYS, differences, read_values
from maxlite.config.schema import CheckpointConfig
from maxlite.errors import UserError
from maxlite.metrics.catalogue import METRICS
from maxlite.metrics.goodput import Stopwatch
from maxlite.metrics.waits import print_to_stderr
from maxlite.metrics.writers import METRICS as METRICS_FORMAT
from maxlite.metrics.writers import read_rows
from maxlite.storage.file_io import write_atomically
from maxlite.storage.json_values import Json, JsonObject

# Keys that name a run and its files, which two equal runs may differ in.
_NAMES = ("run_name", "base_output_directory", *MACHINE_KEYS)
# Metrics of the clock, by unit and by name.
_CLOCK_UNITS = ("s", "tokens/s", "TFLOP/s")
_CLOCK = (
  "mfu",
  *Stopwatch().row(),
  *(name for name, metric in METRICS.items() if metric.unit in _CLOCK_UNITS),
)
# Keys whose other values give the same numbers up to the order of sums.
_ORDER_OF_SUMS = (
  "*_parallelism",
  "gradient_accumulation_steps",
  "logits_chunk_tokens",
  "remat_*",
  "scan_*",
  "attention*",
  "grouped_matmul*",
  "compiler_options",
  "deterministic_reductions",
)
# The relative difference of a loss up to which other orders of sums explain it, in float32.
_ROUNDING = 1e-4
_MAX_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class ValueDifference:
  """A metric, a leaf of the state or a part of the data's position that differs."""

  step: int
  name: str
  # Of metrics and of the data's position.
  a: Json = None
  b: Json = None
  # Of numbers: the largest difference, relative to the largest value, and in units of the last
  # place of its type; None where the values are not read.
  relative: float | None = None
  ulp: float | None = None
  num_elements: int | None = None  # that differ

  def __str__(self) -> str:
    text = self.name
    if self.num_elements is None and not (self.a is None and self.b is None):
      text += f" {_shown(self.a)} and {_shown(self.b)}"
    sizes = []
    if self.num_elements is not None:
      sizes.append(f"{self.num_elements:,} elements differ")
    if self.relative is not None and self.num_elements is None:
      sizes.append(f"relative difference {self.relative:.1e}")
    elif self.relative is not None:
      sizes.append(f"by up to {self.relative:.1e} of the largest value")
    if self.ulp is not None:
      sizes.append(f"{self.ulp:,.0f} ulp")
    return f"{text}: {', '.join(sizes)}" if sizes else text


@dataclasses.dataclass(frozen=True)
class RunDiff:
  """How two runs differ; `str` of it is the report."""

  a: str
  b: str
  config: dict[str, tuple[str, str]]  # by key, as text
  versions: dict[str, tuple[str, str]]  # by package, of the last start
  data: list[ValueDifference]  # of the first checkpoint whose position of the data differs
  metrics: list[ValueDifference]  # of the first step that differs
  state: list[ValueDifference]  # of the first checkpoint that differs
  num_rows: int  # compared
  checkpoints: list[int]  # steps compared
  causes: list[str]

  @property
  def is_equal(self) -> bool:
    """Whether all metrics, states and positions of the data that both have are equal."""
    return not (self.data or self.metrics or self.state)

  def __str__(self) -> str:
    lines = [f"a: {self.a}", f"b: {self.b}"]
    for title, pairs in (("config", self.config), ("versions", self.versions)):
      for name, (before, now) in pairs.items():
        lines.append(f"{title}: {name}={before} and {now}")
    steps = ", ".join(map(str, self.checkpoints)) or "none"
    lines.append(f"compared: {self.num_rows} rows of metrics, checkpoints of steps {steps}")
    for title, found in (("data", self.data), ("metrics", self.metrics), ("state", self.state)):
      if found:
        lines.append(f"DIFFERS: {title}, first at step {found[0].step}, {len(found)} in all")
        lines += [f"  {each}" for each in found[:_MAX_SHOWN]]
    if self.is_equal:
      lines.append("equal, bit for bit")
    lines += [f"likely cause: {cause}" for cause in self.causes]
    return "\n".join(lines)

  def write(self, path: Path) -> None:
    """Write everything as JSON."""
    values = dataclasses.asdict(self) | {"equal": self.is_equal}
    write_atomically(path, json.dumps(values, indent=2))


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> RunDiff:
  """Compare two runs, or two checkpoints (`RUN/checkpoints/STEP`), that should be equal.

  Raises:
    UserError: one of them is not there, is damaged, or they have no step in common.
  """
  run_a, run_b = _open(a), _open(b)
  config = {
    name: (show(before), show(now))
    for name, (before, now) in differences(run_a.values, run_b.values).items()
    if name not in _NAMES
  }
  versions = _changed(run_a.versions, run_b.versions)
  rows_a = {row["step"]: row for row in run_a.rows}
  rows_b = {row["step"]: row for row in run_b.rows}
  common_rows = sorted(rows_a.keys() & rows_b.keys())
  metrics: list[ValueDifference] = []
  for step in common_rows:
    metrics = _row_differences(step, rows_a[step], rows_b[step])
    if metrics:
      break
  data: list[ValueDifference] = []
  state: list[ValueDifference] = []
  steps = _common_checkpoints(run_a, run_b)
  for step_a, step_b in steps:
    stored_a = run_a.checkpoints.stored(step_a)
    stored_b = run_b.checkpoints.stored(step_b)
    data = data or _data_differences(step_a, stored_a[1], stored_b[1])
    state = _state_differences(step_a, StoredParameters(*stored_a), StoredParameters(*stored_b))
    state += _other_leaves(step_a, stored_a[1], stored_b[1])
    if state:
      break
  if not common_rows and not steps:
    raise UserError(f"{run_a.name} and {run_b.name} have no step in common: nothing is compared")
  return RunDiff(
    a=run_a.name,
    b=run_b.name,
    config=config,
    versions=versions,
    data=data,
    metrics=metrics,
    state=state,
    num_rows=len(common_rows),
    checkpoints=[step for step, _ in steps],
    causes=_causes(config, versions, data, metrics, state),
  )


@dataclasses.dataclass(frozen=True)
class _Run:
  """What is compared of a run, or of one of its checkpoints."""

  name: str
  values: dict
  versions: JsonObject
  rows: list[JsonObject]
  checkpoints: Checkpoints
  steps: list[int]


def _open(place: str | os.PathLike[str]) -> _Run:
  """Open a run folder, or one checkpoint in it."""
  path = os.path.expanduser(os.fspath(place)).rstrip("/")
  parent, name = os.path.split(path)
  chosen = step_of(name)
  if os.path.basename(parent) == "checkpoints" and chosen is not None:
    path = os.path.dirname(parent)
  else:
    chosen = None
  folder = RunFolder(path)
  if not folder.config.exists():
    raise UserError(f"{place}: there is no run: give its folder, or RUN/checkpoints/STEP")
  if folder.member_names():
    raise UserError(f"{place} is an ensemble: give a member, such as {place}/members/NAME")
  checkpoints = Checkpoints(CheckpointConfig(), folder.checkpoints, print_to_stderr)
  steps = checkpoints.steps()
  rows: list[JsonObject] = []
  if chosen is None:
    rows = read_rows(folder.metrics, METRICS_FORMAT)
  elif chosen not in steps:
    raise UserError(f"{place}: there is no checkpoint of step {chosen}; there are {steps}")
  else:
    steps = [chosen]
  return _Run(str(place), read_values(folder.config), _versions(folder), rows, checkpoints, steps)


def _versions(folder: RunFolder) -> JsonObject:
  """Versions, devices and mesh of the latest start; empty if the run is older than this file."""
  starts = read_rows(folder.starts)
  if not starts:
    return {}
  return {name: value for name, value in starts[-1].items() if name != "step"}


def _common_checkpoints(run_a: _Run, run_b: _Run) -> list[tuple[int, int]]:
  """The pairs of steps to compare: equal ones, or those of two checkpoints that were named."""
  if len(run_a.steps) == len(run_b.steps) == 1 and not (run_a.rows or run_b.rows):
    return [(run_a.steps[0], run_b.steps[0])]
  return [(step, step) for step in run_a.steps if step in run_b.steps]


def _changed(a: JsonObject, b: JsonObject) -> dict[str, tuple[str, str]]:
  return {
    name: (str(a.get(name)), str(b.get(name)))
    for name in [*a, *(name for name in b if name not in a)]
    if a.get(name) != b.get(name)
  }


def _row_differences(step: int, row_a: JsonObject, row_b: JsonObject) -> list[ValueDifference]:
  """The metrics that differ, except those of the clock."""
  found = []
  for name in [*row_a, *(name for name in row_b if name not in row_a)]:
    if name in _CLOCK or row_a.get(name) == row_b.get(name):
      continue
    found.append(_compare_numbers(step, name, row_a.get(name), row_b.get(name)))
  first = ("loss", "total_loss", "grad_norm")
  return sorted(
    found, key=lambda each: first.index(each.name) if each.name in first else len(first)
  )


def _compare_numbers(step: int, name: str, a: Json, b: Json) -> ValueDifference:
  if not isinstance(a, int | float) or not isinstance(b, int | float):
    return ValueDifference(step, name, a, b)
  relative = abs(a - b) / max(abs(b), math.ulp(0.0))
  # Metrics are float32 on the devices; means over rows of an evaluation are not.
  ulp = _compare(step, name, np.array([a], np.float32), np.array([b], np.float32)).ulp
  return ValueDifference(step, name, a, b, relative=relative, ulp=ulp or None)


def _data_differences(step: int, a: Manifest, b: Manifest) -> list[ValueDifference]:
  """The parts of the data's positions and fingerprints that differ."""
  state_a, state_b = (each["body"]["data"] or {} for each in (a, b))
  found = []
  for name in [*state_a, *(name for name in state_b if name not in state_a)]:
    if state_a.get(name) != state_b.get(name):
      found.append(ValueDifference(step, name, state_a.get(name), state_b.get(name)))
  return found


def _state_differences(
  step: int, a: StoredParameters, b: StoredParameters
) -> list[ValueDifference]:
  """The parameters that differ, in the order of the model; only these are read."""
  found = []
  for path, leaf in a.leaves.items():
    other = b.leaves.get(path)
    if other == leaf:
      continue
    if other is None or other["shape"] != leaf["shape"] or other["dtype"] != leaf["dtype"]:
      found.append(ValueDifference(step, PARAMS + path, _form(leaf), _form(other)))
      continue
    index = tuple(slice(0, size) for size in leaf["shape"])
    found.append(_compare(step, PARAMS + path, a.read(path, index), b.read(path, index)))
  for path, leaf in b.leaves.items():
    if path not in a.leaves:
      found.append(ValueDifference(step, PARAMS + path, None, _form(leaf)))
  a.verify()
  b.verify()
  return found


def _other_leaves(step: int, a: Manifest, b: Manifest) -> list[ValueDifference]:
  """The leaves of the state besides the parameters whose checksums differ."""
  leaves_a, leaves_b = a["body"]["leaves"], b["body"]["leaves"]
  found = []
  for name in [*leaves_a, *(name for name in leaves_b if name not in leaves_a)]:
    if not name.startswith(PARAMS) and leaves_a.get(name) != leaves_b.get(name):
      found.append(ValueDifference(step, name))
  return found


def _form(leaf: JsonObject | None) -> str:
  """Type and shape of a leaf."""
  if leaf is None:
    return "absent"
  return f"{leaf['dtype']}{leaf['shape']}"


def _compare(step: int, name: str, a: np.ndarray, b: np.ndarray) -> ValueDifference:
  """The difference of two arrays of one type whose bits differ."""
  difference = np.abs(a.astype(np.float64) - b.astype(np.float64))
  largest = float(np.max(np.abs(b.astype(np.float64)), initial=0))
  relative = float(np.max(difference, initial=0))
  if largest > 0:
    relative /= largest
  if not math.isfinite(relative):
    relative = math.inf
  steps = np.abs(_ordered(a) - _ordered(b))
  return ValueDifference(
    step,
    name,
    relative=relative,
    ulp=float(np.max(steps, initial=0)),
    num_elements=int(np.count_nonzero(steps)),
  )


def _ordered(x: np.ndarray) -> np.ndarray:
  """Numbers of the floats between 0 and x, as float64: neighbours differ by 1."""
  if not np.issubdtype(x.dtype, np.floating) and x.dtype.name != "bfloat16":
    return x.astype(np.float64)
  bits = x.view(f"i{x.dtype.itemsize}").astype(np.int64)
  lowest = -(2 ** (8 * x.dtype.itemsize - 1))
  return np.where(bits < 0, lowest - bits, bits).astype(np.float64)


def _causes(
  config: dict[str, tuple[str, str]],
  versions: dict[str, tuple[str, str]],
  data: Sequence[ValueDifference],
  metrics: Sequence[ValueDifference],
  state: Sequence[ValueDifference],
) -> list[str]:
  """What usually causes the differences, the likeliest first."""
  if not (data or metrics or state):
    return []
  names = {each.name for each in metrics}
  order = [key for key in config if any(fnmatch.fnmatchcase(key, each) for each in _ORDER_OF_SUMS)]
  others = [key for key in config if key not in order]
  causes = []
  if data or "num_tokens" in names:
    causes.append("the runs read other batches: see the data and its keys")
  if "learning_rate" in names:
    causes.append("another schedule of the learning rate: steps, warmup_steps_fraction and others")
  if others:
    causes.append(f"the config has other values of {', '.join(others)}")
  if order:
    causes.append(
      f"{', '.join(order)}: sums in another order, which round otherwise; "
      "deterministic_reductions=true has one order over `data` and `fsdp`"
    )
  if versions:
    causes.append(f"other {', '.join(versions)}: compilers fuse and order sums in their own way")
  causes += _numeric_causes(metrics, state)
  return causes


def _numeric_causes(
  metrics: Sequence[ValueDifference], state: Sequence[ValueDifference]
) -> list[str]:
  """What the numbers alone say."""
  losses = [each for each in metrics if each.name in ("loss", "total_loss")]
  gradients = [each for each in metrics if each.name == "grad_norm"]
  causes = []
  if losses and losses[0].relative is not None:
    size = losses[0].relative
    if size > _ROUNDING:
      causes.append(
        f"the loss differs by {size:.0e}, which no order of sums explains: other batches, "
        "parameters or code"
      )
    elif losses[0].step > 1:
      causes.append(
        f"the losses before step {losses[0].step} are equal: an update, or a fault of the hardware "
        "in the step before"
      )
  elif gradients:
    causes.append(
      "the loss is equal and the gradients are not: the backward pass, or sums over devices in it"
    )
  elif state and not metrics:
    causes.append(
      "no metric differs before: the update, its optimizer state, or damage of a checkpoint"
    )
  return causes


def _shown(value: Json) -> str:
  if isinstance(value, float):
    return f"{value:.9g}"
  return str(value)
