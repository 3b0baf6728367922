"""The training loop, from the first step of a process to its last."""

import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.config import Config
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.distributed.signals import stop_on_signals
from maxlite.distributed.watchdog import Watchdog
from maxlite.metrics.goodput import STEP, Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.sharding.pytree import PyTree
from maxlite.storage.json_values import Json
from maxlite.training.callbacks import Callback
from maxlite.training.step_log import Log, due


class WrongStepError(Exception):
  """A step whose results are wrong: training ends, and its state is not saved."""


class LoopTrainer(Protocol):
  """A `Trainer`, or the members of an ensemble."""

  @property
  def cfg(self) -> Config: ...

  @property
  def state(self) -> PyTree:
    """The state after the steps taken so far."""

  def next_batch(self, stream: Any) -> PyTree:
    """The batch of the next step."""

  def step(self, batch: PyTree) -> PyTree:
    """Take a step, which donates the state; return its metrics, which may still be computed.

    They are final after the next step, or after reading `state`.

    Raises:
      WrongStepError: the results are wrong.
    """


class CheckpointSaver(Protocol):
  """Checkpoints of one model, or of all members of an ensemble."""

  def save(self, step: int, state: PyTree, data_state: Json) -> None:
    """Start to write a checkpoint; the state may be donated once this returns."""


class BatchStream(Protocol):
  """Batches, and their position for a checkpoint."""

  def state(self) -> Json: ...


@dataclasses.dataclass(frozen=True)
class LoopContext:
  """The collaborators of the training loop."""

  trainer: LoopTrainer
  # None if checkpoints are disabled.
  checkpoints: CheckpointSaver | None
  log: Log
  profiler: Profiler
  # (state) -> held-out results; None without held-out data.
  evaluate: Callable[[PyTree], PyTree] | None
  timer: Stopwatch = dataclasses.field(default_factory=Stopwatch)
  replica_check: ReplicaCheck | None = None
  local_checkpoints: CheckpointSaver | None = None
  callbacks: Sequence[Callback] = ()


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """The state after the loop, and why it stopped."""

  state: PyTree
  step: int
  # Why the loop stopped early; empty if all steps were taken.
  reason: str
  exit_code: int
  # Whether a checkpoint of the state was written, if checkpoints are enabled.
  is_saved: bool = True


@dataclasses.dataclass(frozen=True)
class _Stop:
  """Why to stop after a step, and the exit code of the process."""

  reason: str = ""
  exit_code: int = 0


def train(
  context: LoopContext, stream: BatchStream, first_step: int, last_step: int
) -> TrainResult:
  """Take steps `first_step` to `last_step`; stop early on a signal, a plateau or divergence."""
  trainer = context.trainer
  log = context.log
  timer = context.timer
  step = first_step - 1
  stop = _Stop()
  save_clock = SaveClock(trainer.cfg)
  timer.switch("compile")
  with (
    stop_on_signals() as signals,
    Watchdog(trainer.cfg.run.step_timeout_seconds) as watchdog,
  ):
    for step in range(first_step, last_step + 1):
      is_last = step == last_step
      watchdog.expect_step(step)
      context.profiler.before_step()
      with timer.during("data"):
        batch = trainer.next_batch(stream)
      try:
        metrics = trainer.step(batch)
      except WrongStepError as fault:
        return TrainResult(_settle(context), step, str(fault), exit_code=1, is_saved=False)
      timer.switch(STEP)  # the first call returns after compilation
      context.profiler.after_step(metrics)
      log.add(step, metrics)
      saves_by_time = False
      if save_clock.is_checked(step):
        _settle(context)  # no step runs while the processes communicate
        saves_by_time = save_clock.agree_if_due()
      difference = _replica_difference(context, step)
      if difference:
        state = _settle(context)
        return TrainResult(state, step, difference, exit_code=1, is_saved=False)
      _evaluate_if_due(context, watchdog, step, is_last=is_last)
      stop = _find_stop(log, signals.after(step), is_last=is_last)
      ends = is_last or bool(stop.reason)
      saver = _due_checkpoints(context, step, at_once=ends or saves_by_time)
      if saver is not None:
        _save(context, saver, watchdog, stream, step)
        save_clock.restart()
      if stop.reason:
        break
    state = _settle(context)
    result = TrainResult(state, step, stop.reason, stop.exit_code)
    return _with_late_signal(result, signals.after_last())


def _settle(context: LoopContext) -> PyTree:
  """Wait for the steps taken so far, write the row of the last one, and return the state."""
  state = context.trainer.state  # reading it makes the metrics final
  context.log.settle()
  return state


def _replica_difference(context: LoopContext, step: int) -> str:
  """How the replicas of the state differ, if they are compared after this step; empty if equal."""
  check = context.replica_check
  if check is None or not due(step, context.trainer.cfg.observe.replica_check_period):
    return ""
  return check.difference(context.trainer.state)


def _evaluate_if_due(context: LoopContext, watchdog: Watchdog, step: int, *, is_last: bool) -> None:
  evaluate = context.evaluate
  if evaluate is None:
    return
  if is_last or due(step, context.trainer.cfg.observe.eval_interval):
    watchdog.expect(f"the evaluation after step {step}")
    context.log.settle(functools.partial(evaluate, context.trainer.state))


def _find_stop(log: Log, received: signal.Signals | None, *, is_last: bool) -> _Stop:
  """Why training stops early after a step, if it does; a signal is named before other reasons."""
  stop = _Stop()
  if not is_last:
    stop = _Stop(log.best.stop_reason)
  if log.diverged:
    stop = _Stop(log.diverged, exit_code=1)
  if received is not None:
    stop = _Stop(f"stopped by {received.name}", exit_code=128 + received)
  return stop


class SaveClock:
  """Whether a checkpoint is due by time, as process 0 decides for all processes."""

  def __init__(self, cfg: Config, clock: Callable[[], float] = time.monotonic) -> None:
    """Start the period; `clock` returns seconds."""
    self._seconds = 60 * cfg.checkpoint.checkpoint_period_minutes
    self._check_period = cfg.observe.log_period
    self._clock = clock
    self.restart()

  def restart(self) -> None:
    """Start the period again, after a checkpoint."""
    self._since = self._clock()

  def is_checked(self, step: int) -> bool:
    """Whether all processes call `agree_if_due` after `step`."""
    return self._seconds > 0 and due(step, self._check_period)

  def agree_if_due(self) -> bool:
    """Whether process 0 wants to save."""
    has_passed = self._clock() - self._since >= self._seconds
    return bool(all_gather_object(has_passed)[0])


def _save(
  context: LoopContext,
  saver: CheckpointSaver,
  watchdog: Watchdog,
  stream: BatchStream,
  step: int,
) -> None:
  """Write a checkpoint."""
  log = context.log
  state = _settle(context)
  watchdog.expect(f"the checkpoint of step {step}")
  with context.timer.during("checkpoint"), log.paused():
    log.flush()  # a resumed run does not repeat the rows before its checkpoint
    saver.save(step, state, log.with_totals(stream.state()))
    if saver is context.checkpoints and context.callbacks:
      with context.timer.during("callbacks"):
        for callback in context.callbacks:
          callback.on_checkpoint(step, state)


def _due_checkpoints(context: LoopContext, step: int, *, at_once: bool) -> CheckpointSaver | None:
  """The checkpoints to which `step` is saved: the shared ones, if both are due or `at_once`."""
  cfg = context.trainer.cfg.checkpoint
  is_best = cfg.keep_best_checkpoint and step == context.log.best.step
  if at_once or is_best or due(step, cfg.checkpoint_period):
    return context.checkpoints
  if due(step, cfg.local_checkpoint_period):
    return context.local_checkpoints
  return None


def _with_late_signal(result: TrainResult, received: signal.Signals | None) -> TrainResult:
  """Report a signal that arrived during the last checkpoint: it ends a search's next round."""
  if result.reason or received is None:
    return result
  return dataclasses.replace(result, reason=f"stopped by {received.name}", exit_code=128 + received)
