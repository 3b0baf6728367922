"""The training loop, from the first step of a process to its last."""

import dataclasses
import signal
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.config import Config
from maxlite.distributed.signals import stop_on_signals
from maxlite.distributed.watchdog import Watchdog
from maxlite.metrics.goodput import STEP, Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.training.callbacks import Callback
from maxlite.training.step_log import Log, due


class LoopTrainer(Protocol):
  """A Trainer, or the adapter of an ensemble."""

  @property
  def cfg(self) -> Config: ...

  @property
  def train_step(self) -> Callable[[Any, Any], tuple[Any, Any]]:
    """(state, batch) -> (state, metrics); donates the state."""

  def next_batch(self, stream: Any, state: Any) -> Any:
    """The batch of the next step."""


class CheckpointSaver(Protocol):
  """Checkpoints of one model, or of all members of an ensemble."""

  def save(self, step: int, state: Any, data_state: Any) -> None:
    """Start to write a checkpoint; the state may be donated once this returns."""


class BatchStream(Protocol):
  """Batches, and their position for a checkpoint."""

  def state(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class LoopContext:
  """The collaborators of the training loop."""

  trainer: LoopTrainer
  checkpoints: CheckpointSaver | None
  log: Log
  profiler: Profiler
  evaluate: Callable[[Any], Any] | None  # (state) -> held-out results; None without held-out data
  timer: Stopwatch = dataclasses.field(default_factory=Stopwatch)
  replica_check: ReplicaCheck | None = None
  local_checkpoints: CheckpointSaver | None = None
  callbacks: Sequence[Callback] = ()


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """The state after the loop, and why it stopped."""

  state: Any
  step: int
  reason: str  # empty if all steps were taken
  exit_code: int
  is_saved: bool = True


def train(
  context: LoopContext, state: Any, stream: BatchStream, first_step: int, last_step: int
) -> TrainResult:
  """Take steps `first_step` to `last_step`; stop early on a signal, a plateau or divergence."""
  trainer, log, timer, cfg = context.trainer, context.log, context.timer, context.trainer.cfg
  step, reason, exit_code = first_step - 1, "", 0
  timer.switch("compile")
  with stop_on_signals() as stop, Watchdog(cfg.run.step_timeout_seconds) as watchdog:
    for step in range(first_step, last_step + 1):
      watchdog.expect(f"step {step}")
      context.profiler.before_step()
      with timer.during("data"):
        batch = trainer.next_batch(stream, state)
      state, metrics = trainer.train_step(state, batch)
      timer.switch(STEP)  # the first call returns after compilation
      context.profiler.after_step(metrics)
      log.add(step, metrics)
      if context.replica_check and due(step, cfg.observe.replica_check_period):
        reason = context.replica_check.difference(state)
        if reason:
          log.settle()
          return TrainResult(state, step, reason, exit_code=1, is_saved=False)
      if context.evaluate and (step == last_step or due(step, cfg.observe.eval_interval)):
        watchdog.expect(f"the evaluation after step {step}")
        log.settle(lambda state=state: context.evaluate(state))
      reason = log.best.stop_reason if step < last_step else ""
      if log.diverged:
        reason, exit_code = log.diverged, 1
      if received := stop.after(step):
        reason, exit_code = f"stopped by {received.name}", 128 + received
      is_last = bool(reason) or step == last_step
      if saver := _due_checkpoints(context, step, is_last=is_last):
        log.settle()
        watchdog.expect(f"the checkpoint of step {step}")
        with timer.during("checkpoint"), log.paused():
          log.flush()  # a resumed run does not repeat the rows before its checkpoint
          saver.save(step, state, stream.state())
          for callback in context.callbacks if saver is context.checkpoints else ():
            callback.on_checkpoint(step, state)
      if reason:
        break
    log.settle()
    result = TrainResult(state, step, reason, exit_code)
    return _with_late_signal(result, stop.after_last())


def _with_late_signal(result: TrainResult, received: signal.Signals | None) -> TrainResult:
  """Have a signal during the last checkpoint end what follows, such as a search's next round."""
  if result.reason or received is None:
    return result
  return dataclasses.replace(result, reason=f"stopped by {received.name}", exit_code=128 + received)


def _due_checkpoints(context: LoopContext, step: int, *, is_last: bool) -> CheckpointSaver | None:
  """The checkpoints to which `step` is saved: the shared ones, if both are due."""
  cfg = context.trainer.cfg.checkpoint
  is_best = cfg.keep_best_checkpoint and step == context.log.best.step
  if is_last or is_best or due(step, cfg.checkpoint_period):
    return context.checkpoints
  return context.local_checkpoints if due(step, cfg.local_checkpoint_period) else None
