"""The loop: the whole life of a run, top to bottom."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax

from maxlite.distributed.signals import stop_on_signals
from maxlite.distributed.watchdog import Watchdog
from maxlite.metrics.chips import peak_bf16_tflops
from maxlite.metrics.goodput import STEP, Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.step_row import training_row
from maxlite.metrics.writers import Writers
from maxlite.phases.phase_plan import losses_by_phase
from maxlite.training.trainer import Trainer


class Log(Protocol):
  """Takes the metrics of steps in their order."""

  def add(self, step: int, metrics: Any) -> None:
    """Takes the metrics of `step`, which is under way, and settles those of the step before."""

  def settle(self, evaluation: Callable[[], dict] | None = None) -> None:
    """Waits for the pending step and writes its row, if it is due, with `evaluation`'s figures."""

  def flush(self) -> None:
    """Returns when all rows written so far would survive a crash."""

  @property
  def diverged(self) -> str:
    """Why there is no sense in going on; empty: there is."""


@dataclasses.dataclass(frozen=True)
class Run:
  """What the loop works with."""

  trainer: Any  # a Trainer, or what trains many at once
  checkpoints: Any  # saves (step, state, data state); None: nothing is kept
  log: Log
  profiler: Profiler
  evaluate: Callable[[Any], dict] | None  # of the state; None: nothing was held out
  stopwatch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
  difference: Callable[[Any], str] | None = None  # of the state on devices that hold the same
  local_checkpoints: Any = None  # saves as `checkpoints` do, and more often; None: there are none


@dataclasses.dataclass(frozen=True)
class Ending:
  """Where a run stands when its loop returns, and why it returned."""

  state: Any
  step: int
  reason: str  # empty when all steps were taken
  exit_code: int
  is_saved: bool = True


def train(run: Run, state: Any, stream: Any, first_step: int, last_step: int) -> Ending:
  """Takes steps `first_step` to `last_step`; returns earlier when told to stop or diverging."""
  cfg, log, spent = run.trainer.cfg, run.log, run.stopwatch
  step, reason, exit_code = first_step - 1, "", 0
  spent.switch("compile")
  with stop_on_signals() as stop, Watchdog(cfg.run.step_timeout_seconds) as watchdog:
    for step in range(first_step, last_step + 1):
      watchdog.expect(f"step {step}")
      run.profiler.before_step()
      with spent.during("data"):
        batch = run.trainer.next_batch(stream, state)
      state, metrics = run.trainer.train_step(state, batch)
      spent.switch(STEP)  # the first call has returned when it was compiled
      run.profiler.after_step(metrics)
      log.add(step, metrics)
      if run.difference and due(step, cfg.observe.replica_check_period):
        reason = run.difference(state)
        if reason:
          log.settle()
          return Ending(state, step, reason, exit_code=1, is_saved=False)
      if run.evaluate and (step == last_step or due(step, cfg.observe.eval_period)):
        watchdog.expect(f"the evaluation after step {step}")
        log.settle(lambda state=state: run.evaluate(state))
      if log.diverged:
        reason, exit_code = log.diverged, 1
      if signal := stop.after(step):
        reason, exit_code = f"stopped by {signal.name}", 128 + signal
      is_shared = reason or step == last_step or due(step, cfg.checkpoint.checkpoint_period)
      if is_shared or (run.local_checkpoints and due(step, cfg.checkpoint.local_checkpoint_period)):
        log.settle()
        watchdog.expect(f"the checkpoint of step {step}")
        with spent.during("checkpoint"):
          _save(run, run.checkpoints if is_shared else run.local_checkpoints, step, state, stream)
      if reason:
        break
  log.settle()
  return Ending(state, step, reason, exit_code)


class StepLog:
  """Writes a step's metrics while the device works on the next one."""

  def __init__(self, trainer: Trainer, writers: Writers, stopwatch: Stopwatch | None = None):
    self._trainer, self._writers = trainer, writers
    self._stopwatch = stopwatch or Stopwatch(STEP)
    self._pending: tuple[int, dict[str, Any]] | None = None
    self._settled = self._since = time.perf_counter()
    self._steps_since, self._phase = 0, 0
    self._skipped_in_a_row = 0
    self._flops = trainer.flops_per_step
    self._speed = {
      "num_devices": trainer.mesh.size,
      "peak_tflops": peak_bf16_tflops(trainer.mesh.devices.flat[0].device_kind),
    }

  @property
  def diverged(self) -> str:
    over = self._skipped_in_a_row >= self._trainer.cfg.training.max_skipped_steps
    return describe_divergence(self._skipped_in_a_row) if over else ""

  def add(self, step: int, metrics: dict[str, Any]) -> None:
    self.settle()
    self._pending = (step, metrics)

  def settle(self, evaluation: Callable[[], dict[str, float]] | None = None) -> None:
    if self._pending is None:
      return
    step, metrics = self._pending
    self._pending = None
    numbers = jax.device_get(metrics)
    self._count_step(int(numbers.get("phase", 0)))
    self._skipped_in_a_row = int(numbers["skipped_in_a_row"])
    cfg = self._trainer.cfg
    if not evaluation and step not in (1, cfg.run.steps) and not due(step, cfg.observe.log_period):
      return
    seconds = (self._settled - self._since) / self._steps_since
    flops = self._flops[self._phase]
    row = training_row(step, numbers, step_seconds=seconds, flops_per_step=flops, **self._speed)
    if plan := self._trainer.phase_plan:
      row |= losses_by_phase(plan.phases[self._phase], row)
    if evaluation:
      with self._stopwatch.during("evaluation"):
        row |= evaluation()
    row |= self._stopwatch.row()
    self._writers.write(row, numbers.get("expert_load"))
    self._settled = self._since = time.perf_counter()
    self._steps_since = 0

  def _count_step(self, phase: int) -> None:
    """A phase's speed is that of its own steps: a switch starts the count anew."""
    if phase != self._phase:
      self._since, self._steps_since, self._phase = self._settled, 0, phase
    self._settled = time.perf_counter()
    self._steps_since += 1

  def flush(self) -> None:
    self._writers.flush()


def due(step: int, period: int) -> bool:
  return period > 0 and step % period == 0


def describe_divergence(num_steps: int) -> str:
  return (
    f"loss or gradient was not finite in {num_steps} steps in a row (max_skipped_steps): lower "
    "learning_rate, or start again from an earlier checkpoint"
  )


def _save(run: Run, keeper: Any, step: int, state: Any, stream: Any) -> None:
  """Rows are on disk before the checkpoint that makes a resumed run skip them."""
  if keeper is not None:
    run.log.flush()
    keeper.save(step, state, stream.state())
