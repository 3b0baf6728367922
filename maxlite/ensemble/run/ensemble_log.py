"""The log of members that train together."""

import datetime
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from rich.console import Console

from maxlite.config import Config
from maxlite.config.phases import phases_of
from maxlite.ensemble.engines.engine_base import EnsembleEngine, StackMetrics
from maxlite.ensemble.members.run import MemberRun
from maxlite.metrics.step_row import Row
from maxlite.metrics.writers import JsonConsole, Writers
from maxlite.phases.phase_plan import losses_by_phase
from maxlite.registry import DRAFT_LOSSES
from maxlite.sharding.pytree import PyTree
from maxlite.storage.json_values import JsonObject
from maxlite.training.step_log import Log, add_total, describe_divergence, total_tokens


class EnsembleLog(Log):
  """The log of all members: a row of each, and one line on the console."""

  def __init__(
    self,
    engine: EnsembleEngine,
    cfg: Config,
    runs: Sequence[MemberRun],
    writers: Sequence[Writers],
    console: Console,
  ):
    """
    Args:
      engine: that of the members.
      cfg: the config of the ensemble.
      runs: the members.
      writers: by member, the writers of its rows.
      console: prints the best, median and worst losses of a step.
    """
    super().__init__(cfg, writers, engine.request.devices)
    self._runs = runs
    self._total_tokens = [total_tokens(run.data_state) for run in runs]
    self._console = console
    self._flops = [program.flops for program in engine.programs]
    self._phases = [phases_of(run.config) for run in runs]
    self._diverged: set[int] = set()  # the numbers of the members

  @property
  def diverged(self) -> str:
    if len(self._diverged) < len(self._runs):
      return ""
    return "all members diverged: " + describe_divergence(self._cfg.training.max_skipped_steps)

  def _count_step(self, step: int, metrics: StackMetrics) -> None:
    self._steps_since += 1
    common_tokens_Z = metrics.common.get("num_tokens")
    for z in range(len(self._runs)):
      if z in self._diverged:
        continue
      if common_tokens_Z is None:
        self._count_tokens(z, metrics.own[z]["num_tokens"])
      else:
        self._count_tokens(z, common_tokens_Z[z])
    for z, skipped in enumerate(metrics.common["skipped_in_a_row"]):
      run = self._runs[z]
      limit = run.config.training.max_skipped_steps
      if skipped < limit:
        self._diverged.discard(z)  # in a population: it continues from another member
      elif z not in self._diverged:
        self._diverged.add(z)
        self._console.print(f"{run.name} diverged by step {step}: {describe_divergence(limit)}")

  def _write(
    self,
    step: int,
    metrics: StackMetrics,
    evaluation: Callable[[], list[dict[str, float]]] | None,
  ) -> None:
    seconds = self._step_seconds(time.perf_counter())
    evaluated: list[dict[str, float]] = [{} for _ in self._runs]
    if evaluation is not None:
      evaluated = evaluation()
    rows = {}
    for z, run in enumerate(self._runs):
      if z in self._diverged:
        continue
      of_member: dict[str, PyTree] = metrics.of_member(z)
      row = self._member_row(z, step, of_member, seconds)
      row.update(evaluated[z])
      rows[run.name] = row
      self._writers[z].write(row, of_member.get("expert_load"))
    if isinstance(self._console, JsonConsole):
      for name, row in rows.items():
        self._console.print_row(row, member=name)
    else:
      lines = describe_step(step, self._cfg.run.steps, seconds, rows)
      self._console.print("\n".join(lines))

  def _member_row(
    self,
    z: int,
    step: int,
    metrics: Mapping[str, np.ndarray],
    seconds: float | None,
  ) -> Row:
    """The row that the member's solo run would log."""
    index = int(metrics.get("phase", 0))
    phase = None
    if self._phases[z]:
      phase = self._phases[z][index]
      if phase.loss not in DRAFT_LOSSES:
        metrics = {name: value for name, value in metrics.items() if name != "draft_loss"}
    row = self._row(step, metrics, seconds, self._flops[z][index], index=z)
    if phase is not None:
      row |= losses_by_phase(phase, row)
    return row

  def with_totals(self, data_state: list[JsonObject]) -> list[JsonObject]:
    return [add_total(*each) for each in zip(data_state, self._total_tokens, strict=True)]


def describe_step(
  step: int,
  num_steps: int,
  seconds: float | None,
  rows: Mapping[str, Row],
) -> list[str]:
  """The lines of a step on the console: the best, median and worst losses of the members.

  Args:
    seconds: the duration of a step; None: not known.
    rows: by member, the row of this step.
  """
  speed = ""
  if seconds is not None:
    speed = f"  {seconds:.3f} s"
    seconds_left = round(seconds * (num_steps - step))
    if seconds_left:
      speed += f"  {datetime.timedelta(seconds=seconds_left)} left"
  lines = []
  for name in ("eval_loss", "loss"):
    losses = {member: row[name] for member, row in rows.items() if row.get(name) is not None}
    if not losses:
      continue
    best = min(losses, key=lambda member: losses[member])
    worst = max(losses, key=lambda member: losses[member])
    median = statistics.median(losses.values())
    lines.append(
      f"step {step}/{num_steps}  {name.replace('_', ' ')}: best {losses[best]:.4f} ({best}), "
      f"median {median:.4f}, worst {losses[worst]:.4f} ({worst})  {len(rows)} members{speed}"
    )
  return lines
