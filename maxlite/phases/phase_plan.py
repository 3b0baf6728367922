"""The phases of a config: what each trains, for how long, and in which order."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from maxlite.config.phases import DATA_KEYS, PhaseConfig
from maxlite.config.raw_values import show
from maxlite.config.schema import DataConfig, flatten
from maxlite.optim.labels import Partition, paths_in
from maxlite.phases.phase_schedule import PhaseSchedule, Plateau, Threshold

PhaseSpan = tuple[int, int, str]  # first and last step of a span, and its phase
LOSS_NAMES = ("loss", "draft_loss", "total_loss")  # in a step's row


class PhasePlan:
  """The phases, their schedule and the parameters that each trains."""

  def __init__(self, phases: Sequence[PhaseConfig], initial_phases: Mapping[str, int], params: Any):
    """
    Args:
      initial_phases: by phase, steps that it takes alone before the cycle begins.
      params: may be abstract (`jax.ShapeDtypeStruct`).
    """
    self.phases, self._params = phases, params
    self.schedule = PhaseSchedule({p.name: _length(p) for p in phases}, initial_phases)
    self.partitions = Partition.by_phase(params, {phase.name: phase.train for phase in phases})

  @property
  def trained(self) -> Partition:
    """The parameters that some phase trains."""
    return Partition.union(self.partitions.values())

  @property
  def untrained_paths(self) -> list[str]:
    return paths_in(self.trained.split(self._params)[1])

  def num_steps(self, phase: PhaseConfig, run_steps: int) -> int:
    """Steps of `phase` in a run of `run_steps`; all of them if any phase ends on a condition."""
    if any(other.until for other in self.phases):
      return run_steps
    spans = self.schedule.timeline(run_steps)
    return max(sum(last - first + 1 for first, last, name in spans if name == phase.name), 1)

  def spans(self, num_steps: int, rows: Sequence[dict] = ()) -> list[PhaseSpan]:
    """(first step, last step, phase) of each span in `num_steps` steps, counted from 1.

    If any phase ends on a condition, the spans are those of the logged `rows`.
    """
    if all(phase.steps for phase in self.phases):
      return self.schedule.timeline(num_steps)
    return spans_of_rows(rows, [phase.name for phase in self.phases])

  def describe(self, num_steps: int, run_data: DataConfig) -> list[str]:
    """Lines on what each phase trains, and on the order of phases in `num_steps` steps."""
    lines = [self.describe_phase(phase, run_data) for phase in self.phases]
    if spans := self.spans(num_steps):
      shown = [f"{name} {first}-{last}" for first, last, name in spans[:6]]
      lines.append(f"schedule: {', '.join(shown)}" + (", ..." if len(spans) > len(shown) else ""))
    return lines

  def describe_phase(self, phase: PhaseConfig, run_data: DataConfig) -> str:
    """A line on what the phase trains, and on the data keys that differ from the run's."""
    trained, _ = self.partitions[phase.name].split(self._params)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(trained))
    length = f"{phase.steps} steps" if phase.steps else f"up to {phase.until.max_steps} steps"
    line = (
      f"phase {phase.name}: {length} of {phase.loss} by {phase.optimizer.opt_type}, trains "
      f"{num_trained:,} parameters ({', '.join(phase.train)})"
    )
    own, shared = flatten(phase.data), flatten(run_data)
    changed = [f"{key}={show(own[key])}" for key in DATA_KEYS if own[key] != shared[key]]
    return line + (f", with {' '.join(changed)}" if changed else "")


def losses_by_phase(phase: PhaseConfig, row: Mapping[str, Any]) -> dict[str, Any]:
  """The losses of a step's row, keyed by the phase: `fit/loss`."""
  return {f"{phase.name}/{name}": row[name] for name in LOSS_NAMES if name in row}


def spans_of_rows(rows: Sequence[dict], names: Sequence[str]) -> list[PhaseSpan]:
  """Derive spans from logged rows; each starts after the last row of the previous one."""
  spans: list[PhaseSpan] = []
  for row in (row for row in rows if "phase" in row):
    name, step = names[int(row["phase"])], int(row["step"])
    if spans and spans[-1][2] == name:
      spans[-1] = (spans[-1][0], step, name)
    else:
      spans.append((spans[-1][1] + 1 if spans else 1, step, name))
  return spans


def _length(phase: PhaseConfig) -> int | Plateau | Threshold:
  if phase.until is None:
    return phase.steps
  until = phase.until
  if until.patience is not None:
    return Plateau(until.metric, until.patience, until.max_steps, until.min_delta)
  return Threshold(until.metric, until.max_steps, until.below, until.above)
