"""Members that train together, in the roles that the training loop needs."""

import dataclasses
import datetime
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console

from maxlite.config import Config, UserError
from maxlite.config.phases import phases_of
from maxlite.config.registry import DRAFT_LOSSES
from maxlite.data.batch import Batch
from maxlite.data.loader import DataLoader, TrainStream
from maxlite.ensemble.engines.engine_base import EnsembleEngine, StackMetrics
from maxlite.ensemble.engines.stacked import StackedEngine
from maxlite.ensemble.planner import Plan
from maxlite.ensemble.run.member_run import MemberRun
from maxlite.ensemble.selection.population import Population
from maxlite.evaluation.held_out import held_out_row
from maxlite.metrics.goodput import KINDS, Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.writers import Writers
from maxlite.runs.saved_run import run_folder
from maxlite.training.loop import LoopContext, TrainResult, train
from maxlite.training.step_log import Log, describe_divergence


@dataclasses.dataclass(frozen=True)
class EnsembleTrainer:
  """Members at the same step and their engine, as the loop's trainer and its checkpoints."""

  cfg: Config
  plan: Plan
  engine: EnsembleEngine
  runs: list[MemberRun]
  loaders: list[DataLoader]  # of the members; the rows of this process
  whole_batches: DataLoader  # the same data, all rows

  @property
  def train_step(self) -> Callable[[Any, Any], tuple[Any, Any]]:
    return self.engine.step

  def next_batch(self, stream: "MemberStreams", _state: Any) -> Batch:
    return self.engine.place(next(stream), own_batches=self.engine.request.own_batches)

  def open_streams(self) -> "MemberStreams":
    """The members' batches, from their current step on."""
    streams = []
    readers = self.runs if self.engine.request.own_batches else self.runs[:1]
    for run, loader in zip(readers, self.loaders, strict=False):
      stream = loader.train_stream()
      if run.data_state is not None:
        try:
          stream.restore(run.data_state)
        except UserError as error:
          raise UserError(f"member {run.name}: {error}") from None
      streams.append(stream)
    return MemberStreams(streams, len(self.runs))

  def eval_batches(self) -> Iterator[Batch]:
    """Held-out batches with all rows."""
    return self.whole_batches.eval_batches(self.cfg.observe.eval_steps)

  def predict(self, state: Any, batch: Batch, method: str = "predict") -> list[Any]:
    return self.engine.predict(state, self.engine.place(batch), method)

  def evaluate(self, state: Any) -> list[dict[str, float]]:
    """Per member, its held-out loss and figures on the same batches."""
    batches = self.loaders[0].eval_batches_by_source(self.cfg.observe.eval_steps)
    sums = {
      name: jax.device_get([self.predict(state, batch, "evaluate") for batch in each])
      for name, each in batches.items()
    }
    members = range(len(self.runs))
    return [
      held_out_row({name: [b[z] for b in each] for name, each in sums.items()}) for z in members
    ]

  def save(self, step: int, state: Any, data_states: list[dict]) -> None:
    """Start to write a checkpoint of every member, all at the same time in one process."""
    states = self.engine.unpack(state)
    for run, own, data_state in zip(self.runs, states, data_states, strict=True):
      if run.checkpoints is not None:
        run.checkpoints.save(step, own, data_state)
        if self.engine.request.spans_processes:
          run.checkpoints.wait()  # Orbax numbers barriers in the order of each process's writes

  def pack(self) -> Any:
    """The engine's state of the members, which give theirs up or are new."""
    states = [run.state for run in self.runs]
    for run in self.runs:
      run.state = None
    return self.engine.init() if states[0] is None else self.engine.pack(states)

  def unpack(self, state: Any) -> None:
    for run, own in zip(self.runs, self.engine.unpack(state), strict=True):
      run.state = own


def train_members(trainer: EnsembleTrainer, last_step: int, console: Console) -> TrainResult:
  """Train up to `last_step`; the members take their states, and the result has none."""
  cfg, runs, streams = trainer.cfg, trainer.runs, trainer.open_streams()
  for run in runs:
    run.save_config()
  writers = [run.open_writers() for run in runs]
  log = EnsembleLog(trainer, writers, console)
  profiler = Profiler(cfg.observe, run_folder(cfg).profile)
  evaluate = None if trainer.loaders[0].source.eval is None else trainer.evaluate
  timer = Stopwatch("compile")
  context = LoopContext(trainer, trainer, log, profiler, evaluate, timer)
  population = None
  if cfg.ensemble.pbt_period:
    assert isinstance(trainer.engine, StackedEngine)  # as the rules of the config require
    population = Population(cfg, runs, trainer.engine, run_folder(cfg).directory, console)
  try:
    what = f"compiling the steps of {len(runs)} members ({trainer.plan.strategy})"
    with timer.report_waits(console.print, KINDS | {"compile": what}):
      result = _train_segments(context, trainer, streams, last_step, population)
    trainer.unpack(result.state)
    for run, data_state in zip(runs, streams.state(), strict=True):
      run.step, run.data_state = result.step, data_state
  finally:
    for each in (profiler, streams, *writers, *([population] if population else [])):
      each.close()
  return dataclasses.replace(result, state=None)


def _train_segments(
  context: LoopContext,
  trainer: EnsembleTrainer,
  streams: "MemberStreams",
  last_step: int,
  population: Population | None,
) -> TrainResult:
  """Train up to `last_step`, from one exchange of the population to the next."""
  state, step = trainer.pack(), trainer.runs[0].step
  while True:
    end = last_step
    if population:
      state = population.exchange(state, step)
      end = min(end, population.next_step(step))
    result = train(context, state, streams, step + 1, end)
    if result.reason or end == last_step:
      return result
    state, step = result.state, end


class MemberStreams:
  """The members' batches: of one stream that all share, or of a stream each, stacked."""

  def __init__(self, streams: Sequence[TrainStream], num_members: int):
    self._streams, self._num_members = streams, num_members

  def __next__(self) -> Batch:
    if len(self._streams) == 1:
      return next(self._streams[0])
    return jax.tree.map(lambda *leaves: np.stack(leaves), *map(next, self._streams))

  def state(self) -> list[dict]:
    states = [stream.state() for stream in self._streams]
    return states * self._num_members if len(states) == 1 else states

  def close(self) -> None:
    for stream in self._streams:
      stream.close()


class EnsembleLog(Log):
  """The log of all members: a row of each, and one line on the console."""

  def __init__(self, trainer: EnsembleTrainer, writers: Sequence[Writers], console: Console):
    super().__init__(trainer.cfg, writers, trainer.engine.request.devices)
    self._runs, self._console = trainer.runs, console
    self._flops = [program.flops for program in trainer.engine.programs]
    self._phases = [phases_of(run.config) for run in self._runs]
    self._diverged: set[int] = set()

  @property
  def diverged(self) -> str:
    if len(self._diverged) < len(self._runs):
      return ""
    return "all members diverged: " + describe_divergence(self._cfg.training.max_skipped_steps)

  def _count_step(self, step: int, metrics: StackMetrics) -> None:
    self._steps_since += 1
    for z, skipped in enumerate(metrics.common["skipped_in_a_row"]):
      run = self._runs[z]
      limit = run.config.training.max_skipped_steps
      if skipped < limit:
        self._diverged.discard(z)  # of a population: it continues from another member
      elif z not in self._diverged:
        self._diverged.add(z)
        self._console.print(f"{run.name} diverged by step {step}: {describe_divergence(limit)}")

  def _write(
    self,
    step: int,
    metrics: StackMetrics,
    evaluation: Callable[[], list[dict]] | None,
  ) -> None:
    seconds = self._step_seconds(time.perf_counter())
    evaluated = evaluation() if evaluation else [{}] * len(self._runs)
    rows = {}
    for z, run in enumerate(self._runs):
      if z not in self._diverged:
        of_member = metrics.of_member(z)
        rows[run.name] = self._member_row(z, step, of_member, seconds) | evaluated[z]
        self._writers[z].write(rows[run.name], of_member.get("expert_load"))
    self._console.print(*describe_step(step, self._cfg.run.steps, seconds, rows), sep="\n")

  def _member_row(self, z: int, step: int, metrics: dict, seconds: float | None) -> dict:
    """The row that the member's solo run would log."""
    index = int(metrics.get("phase", 0))
    phase = self._phases[z][index] if self._phases[z] else None
    if phase is not None and phase.loss not in DRAFT_LOSSES:
      metrics = {name: x for name, x in metrics.items() if name != "draft_loss"}
    return self._row(step, metrics, seconds, self._flops[z][index], phase)


def describe_step(
  step: int, num_steps: int, seconds: float | None, rows: Mapping[str, Mapping[str, Any]]
) -> list[str]:
  """The lines of a step: of the members' rows the best, median and worst losses."""
  speed = ""
  if seconds is not None:
    left = datetime.timedelta(seconds=round(seconds * (num_steps - step)))
    speed = f"  {seconds:.3f} s" + f"  {left} left" * bool(left)
  lines = []
  for name in ("eval_loss", "loss"):
    losses = {member: row[name] for member, row in rows.items() if row.get(name) is not None}
    if losses:
      best = min(losses, key=lambda member: losses[member])
      worst = max(losses, key=lambda member: losses[member])
      median = statistics.median(losses.values())
      lines.append(
        f"step {step}/{num_steps}  {name.replace('_', ' ')}: best {losses[best]:.4f} ({best}), "
        f"median {median:.4f}, worst {losses[worst]:.4f} ({worst})  {len(rows)} members{speed}"
      )
  return lines
