"""Members that train together, in the roles that the training loop needs."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from rich.console import Console

from maxlite.config import Config
from maxlite.data.batch import Batch
from maxlite.data.loader import DataLoader, TrainStream
from maxlite.ensemble.engines.engine_base import EnsembleEngine, StackMetrics
from maxlite.ensemble.engines.planner import Plan
from maxlite.ensemble.engines.stacked import StackedEngine
from maxlite.ensemble.members.common_step import Segment
from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.run.ensemble_log import EnsembleLog
from maxlite.ensemble.selection.population import Population
from maxlite.errors import UserError
from maxlite.evaluation.held_out import held_out_row
from maxlite.metrics.goodput import KINDS, Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.runs.saved_run import run_folder
from maxlite.sharding.pytree import PyTree
from maxlite.storage.json_values import JsonObject
from maxlite.training.loop import LoopContext, TrainResult, train


@dataclasses.dataclass
class EnsembleTrainer:
  """Members at the same step and their engine, as the loop's trainer and its checkpoints."""

  cfg: Config
  plan: Plan
  engine: EnsembleEngine
  runs: list[MemberRun]
  loaders: list[DataLoader]  # by member, its data; batches have the rows of this process
  whole_batches: DataLoader  # the data of the first member; batches have all rows
  state: PyTree = None  # the state of the engine, between `pack` and `unpack`

  def next_batch(self, stream: "MemberStreams") -> Batch:
    """The batch of the next step, of all members."""
    return self.engine.place(next(stream), own_batches=self.engine.request.own_batches)

  def step(self, batch: Batch) -> StackMetrics:
    """Take a step of all members."""
    self.state, metrics = self.engine.step(self.state, batch)
    return metrics

  def open_streams(self) -> "MemberStreams":
    """The members' batches, from their current step on."""
    readers = self.runs
    if not self.engine.request.own_batches:
      readers = self.runs[:1]
    streams = []
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

  def predict(self, state: PyTree, batch: Batch, method: str = "predict") -> list[PyTree]:
    """Per member, the result of its function of this name."""
    return self.engine.predict(state, self.engine.place(batch), method)

  def evaluate(self, state: PyTree) -> list[dict[str, float]]:
    """Per member, its held-out loss and figures on the same batches."""
    sums: list[dict[str, list[PyTree]]] = [{} for _ in self.runs]  # by member and source
    sources = self.loaders[0].eval_batches_by_source(self.cfg.observe.eval_steps)
    for source, batches in sources.items():
      for own in sums:
        own[source] = []
      results = [self.predict(state, batch, "evaluate") for batch in batches]
      for sums_of_batch in jax.device_get(results):
        for own, sums_of_member in zip(sums, sums_of_batch, strict=True):
          own[source].append(sums_of_member)
    return [held_out_row(own) for own in sums]

  def save(self, step: int, state: PyTree, data_states: list[JsonObject]) -> None:
    """Start to write a checkpoint of every member, all at the same time in one process.

    The checkpoints before these stay until all of these are written, so that there is a step that
    all members have.
    """
    states = self.engine.unpack(state)
    checkpoints = [run.checkpoints for run in self.runs if run.checkpoints is not None]
    for each in checkpoints:
      each.wait()
    for each in checkpoints:
      each.kept_step = functools.partial(_latest_before, each.steps(), step)
    for each, own, data_state in zip(checkpoints, states, data_states, strict=True):
      each.save(step, own, data_state)
      if self.engine.request.spans_processes:
        each.wait()  # Orbax numbers barriers in the order of each process's writes

  def pack(self) -> PyTree:
    """The engine's state of the members, which give theirs up or are new."""
    states = [run.state for run in self.runs]
    for run in self.runs:
      run.state = None
    if states[0] is None:
      return self.engine.init()
    return self.engine.pack(states)

  def unpack(self, state: PyTree) -> None:
    """Give the members their states."""
    for run, own in zip(self.runs, self.engine.unpack(state), strict=True):
      run.state = own


def train_members(trainer: EnsembleTrainer, last_step: int, console: Console) -> TrainResult:
  """Train up to `last_step`; the members take their states, and the result has none."""
  cfg = trainer.cfg
  runs = trainer.runs
  timer = Stopwatch("compile")
  with contextlib.ExitStack() as opened:
    streams = opened.enter_context(contextlib.closing(trainer.open_streams()))
    segment = Segment(runs[0].step, tuple(run.name for run in runs))
    for run in runs:
      run.begin(segment)
    writers = [opened.enter_context(contextlib.closing(run.open_writers())) for run in runs]
    profiler = Profiler(cfg.observe, run_folder(cfg).profile)
    opened.callback(profiler.close)
    population = None
    if cfg.ensemble.pbt_period:
      assert isinstance(trainer.engine, StackedEngine)  # as the rules of the config require
      directory = run_folder(cfg).directory
      population = Population(cfg, runs, trainer.engine, directory, console)
      opened.callback(population.close)
    evaluate = None
    if trainer.loaders[0].source.eval is not None:
      evaluate = trainer.evaluate
    context = LoopContext(
      trainer=trainer,
      checkpoints=trainer,
      log=EnsembleLog(trainer.engine, cfg, runs, writers, console),
      profiler=profiler,
      evaluate=evaluate,
      timer=timer,
    )
    compiling = f"compiling the steps of {len(runs)} members ({trainer.plan.strategy})"
    with timer.report_waits(console.print, KINDS | {"compile": compiling}):
      result = _train_segments(context, trainer, streams, last_step, population)
    trainer.unpack(result.state)
    trainer.state = None  # the members have theirs
    data_states = context.log.with_totals(streams.state())
    for run, data_state in zip(runs, data_states, strict=True):
      run.step = result.step
      run.data_state = data_state
  return dataclasses.replace(result, state=None)


def _train_segments(
  context: LoopContext,
  trainer: EnsembleTrainer,
  streams: "MemberStreams",
  last_step: int,
  population: Population | None,
) -> TrainResult:
  """Train up to `last_step`, from one exchange of the population to the next."""
  trainer.state = trainer.pack()
  step = trainer.runs[0].step
  while True:
    end = last_step
    if population is not None:
      trainer.state = population.exchange(trainer.state, step)
      end = min(end, population.next_step(step))
    result = train(context, streams, step + 1, end)
    if result.reason or end == last_step:
      return result
    step = end


def _latest_before(steps: Sequence[int], step: int) -> int:
  return max((each for each in steps if each < step), default=0)


class MemberStreams:
  """The members' batches: of one stream that all share, or of a stream each, stacked."""

  def __init__(self, streams: Sequence[TrainStream], num_members: int):
    self._streams = streams
    self._num_members = num_members

  def __next__(self) -> Batch:
    batches = [next(stream) for stream in self._streams]
    if len(batches) == 1:
      return batches[0]

    def stack(*leaves: np.ndarray) -> np.ndarray:
      return np.stack(leaves)

    return jax.tree.map(stack, *batches)

  def state(self) -> list[JsonObject]:
    """Per member, the position of its batches."""
    states = [stream.state() for stream in self._streams]
    if len(states) == 1:
      return states * self._num_members
    return states

  def close(self) -> None:
    for stream in self._streams:
      stream.close()
