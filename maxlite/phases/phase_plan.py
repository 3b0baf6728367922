"""The phases of a config: what each trains, for how long, and in which order."""

from collections.abc import Mapping, Sequence

import jax

from maxlite.config.raw_values import show
from maxlite.config.schema import DataConfig, flatten
from maxlite.config.schema.entries import DATA_KEYS, PhaseConfig
from maxlite.errors import UserError
from maxlite.metrics.step_row import Row
from maxlite.optim.labels import Labels, frozen_paths, split, union
from maxlite.phases.phase_opt_states import owners_of
from maxlite.phases.phase_schedule import PhaseSchedule, Plateau, Threshold
from maxlite.sharding.pytree import PyTree

PhaseSpan = tuple[int, int, str]  # The first and last step of a span, and its phase.
# Names in the row of a step.
LOSS_NAMES = ("loss", "draft_loss", "mtp_loss", "indexer_loss", "total_loss")
_NUM_SHOWN = 6  # Spans in the description of a schedule.


class PhasePlan:
  """The phases, their schedule and the parameters that each trains."""

  def __init__(
    self,
    phases: Sequence[PhaseConfig],
    initial_phases: Mapping[str, int],
    params: PyTree,
    labels: Mapping[str, Labels],
  ):
    """
    Args:
      phases: in the order of the cycle.
      initial_phases: by phase, steps that it takes alone before the cycle begins.
      params: may be abstract (`jax.ShapeDtypeStruct`).
      labels: by phase, what it trains.
    """
    self.phases = phases
    self._params = params
    self.schedule = _schedule_of(phases, initial_phases)
    self.labels = labels
    # By phase, the phase whose optimizer state it updates.
    self.owners = _owners_of(phases)
    self._initial_phases = dict(initial_phases)

  @property
  def trained(self) -> Labels:
    """The parameters that some phase trains."""
    return union(self.labels.values())

  @property
  def untrained_paths(self) -> list[str]:
    return frozen_paths(*self.labels.values())

  def spans(self, num_steps: int, rows: Sequence[dict] = ()) -> list[PhaseSpan]:
    """(first step, last step, phase) of each span in `num_steps` steps, counted from 1.

    If any phase ends on a condition, the spans are those of the logged `rows`.
    """
    if not any(phase.until for phase in self.phases):
      return self.schedule.timeline(num_steps)
    return spans_of_rows(rows, [phase.name for phase in self.phases])

  def describe(
    self, phases: Sequence[PhaseConfig], num_steps: int, run_data: DataConfig
  ) -> list[str]:
    """Lines on what each phase trains, and on the order of phases in `num_steps` steps.

    Args:
      phases: the phases with their data.
    """
    lines = [self.describe_phase(phase, run_data) for phase in phases]
    spans = self.spans(num_steps)
    if spans:
      shown = [f"{name} {first}-{last}" for first, last, name in spans[:_NUM_SHOWN]]
      if len(spans) > _NUM_SHOWN:
        shown.append("...")
      lines.append(f"schedule: {', '.join(shown)}")
    return lines

  def describe_phase(self, phase: PhaseConfig, run_data: DataConfig) -> str:
    """A line on what the phase trains, and on the data keys that differ from the run's."""
    trained, _ = split(self._params, self.labels[phase.name])
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(trained))
    line = (
      f"phase {phase.name}: {self._describe_length(phase)} of {phase.loss} by "
      f"{phase.optimizer.opt_type}, trains {num_trained:,} parameters ({', '.join(phase.train)})"
    )
    if phase.repeat_batch > 1:
      line += f", {phase.repeat_batch} times on each batch"
    if phase.share_optimizer_state:
      line += f", with the optimizer state of {phase.share_optimizer_state}"
    own = flatten(phase.data)
    shared = flatten(run_data)
    changed = []
    for key in DATA_KEYS:
      if own[key] != shared[key]:
        changed.append(f"{key}={show(own[key])}")
    if changed:
      line += f", with {' '.join(changed)}"
    return line

  def _describe_length(self, phase: PhaseConfig) -> str:
    if phase.until is not None:
      return f"up to {phase.until.max_steps} steps"
    if phase.steps is not None:
      return f"{phase.steps} steps"
    return f"{self._initial_phases[phase.name]} initial steps"


def num_updates_of(
  phases: Sequence[PhaseConfig], initial_phases: Mapping[str, int], num_steps: int
) -> dict[str, int]:
  """By phase, the number of updates of its optimizer state in `num_steps` steps.

  If any phase ends on a condition, their largest possible number.
  """
  owners = _owners_of(phases)
  spans = []
  if not any(phase.until for phase in phases):
    spans = _schedule_of(phases, initial_phases).timeline(num_steps)
  num_updates = {}
  for phase in phases:
    repeats = {}
    for each in phases:
      if owners[each.name] == owners[phase.name]:
        repeats[each.name] = each.repeat_batch
    if spans:
      total = sum((last - first + 1) * repeats.get(name, 0) for first, last, name in spans)
      num_updates[phase.name] = max(total, 1)
    else:
      num_updates[phase.name] = num_steps * max(repeats.values())
  return num_updates


def _schedule_of(phases: Sequence[PhaseConfig], initial_phases: Mapping[str, int]) -> PhaseSchedule:
  return PhaseSchedule({phase.name: _length(phase) for phase in phases}, initial_phases)


def _owners_of(phases: Sequence[PhaseConfig]) -> dict[str, str]:
  return owners_of({phase.name: phase.share_optimizer_state for phase in phases})


def losses_by_phase(phase: PhaseConfig, row: Row) -> Row:
  """The losses of a step's row, keyed by the phase: `fit/loss`."""
  return {f"{phase.name}/{name}": row[name] for name in LOSS_NAMES if name in row}


def spans_of_rows(rows: Sequence[dict], names: Sequence[str]) -> list[PhaseSpan]:
  """Derive spans from logged rows; each starts after the last row of the previous one."""
  spans: list[PhaseSpan] = []
  next_first = 1
  for row in rows:
    if "phase" not in row:
      continue
    step = int(row["step"])
    if row["phase"] not in range(len(names)):
      raise UserError(f"the metrics of step {step} are of phase {row['phase']}: move the file away")
    name = names[int(row["phase"])]
    first = next_first
    if spans and spans[-1][2] == name:  # the span continues
      first, _, _ = spans.pop()
    spans.append((first, step, name))
    next_first = step + 1
  return spans


def _length(phase: PhaseConfig) -> int | Plateau | Threshold | None:
  until = phase.until
  if until is None:
    return phase.steps
  if until.patience is not None:
    return Plateau(until.metric, until.patience, until.max_steps, until.min_delta)
  return Threshold(until.metric, until.max_steps, until.below, until.above)
