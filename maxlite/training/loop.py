"""The loop: the whole life of a run, top to bottom."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxlite.config import Config
from maxlite.config.phases import PhaseConfig
from maxlite.distributed.signals import stop_on_signals
from maxlite.distributed.watchdog import Watchdog
from maxlite.metrics.chips import peak_bf16_tflops
from maxlite.metrics.goodput import STEP, Stopwatch
from maxlite.metrics.profiler import Profiler
from maxlite.metrics.step_row import training_row
from maxlite.metrics.writers import Writers
from maxlite.phases.phase_plan import losses_by_phase
from maxlite.training.trainer import Trainer


class Log:
  """Writes the metrics of a step while the devices run the next one."""

  def __init__(self, cfg: Config, writers: Sequence[Writers], devices: Sequence[jax.Device]):
    self._cfg, self._writers = cfg, writers
    self._pending: tuple[int, Any] | None = None
    self._speed = {
      "num_devices": len(devices),
      "peak_tflops": peak_bf16_tflops(devices[0].device_kind),
    }

  @property
  def diverged(self) -> str:
    """Why training cannot continue; empty if it can."""
    raise NotImplementedError

  def add(self, step: int, metrics: Any) -> None:
    """Take the metrics of `step`, which is running, and settle those of the step before."""
    self.settle()
    self._pending = (step, metrics)

  def settle(self, evaluation: Callable[[], Any] | None = None) -> None:
    """Wait for the pending step and write its row, if it is due, with the held-out results."""
    if self._pending is None:
      return
    (step, metrics), self._pending = self._pending, None
    metrics = jax.device_get(metrics)
    self._count_step(step, metrics)
    observe, last = self._cfg.observe, self._cfg.run.steps
    if evaluation or step in (1, last) or due(step, observe.log_period):
      self._write(step, metrics, evaluation)

  def flush(self) -> None:
    """Return when all rows written so far would survive a crash."""
    for writers in self._writers:
      writers.flush()

  def _row(
    self, step: int, metrics: dict, seconds: float, flops: float, phase: PhaseConfig | None
  ) -> dict[str, Any]:
    row = training_row(step, metrics, step_seconds=seconds, flops_per_step=flops, **self._speed)
    return row | (losses_by_phase(phase, row) if phase else {})

  def _count_step(self, step: int, metrics: Any) -> None:
    raise NotImplementedError

  def _write(self, step: int, metrics: Any, evaluation: Callable[[], Any] | None) -> None:
    raise NotImplementedError


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


class StepLog(Log):
  """The log of one model."""

  def __init__(self, trainer: Trainer, writers: Writers, stopwatch: Stopwatch | None = None):
    super().__init__(trainer.cfg, [writers], list(trainer.mesh.devices.flat))
    self._plan, self._flops = trainer.phase_plan, trainer.flops_per_step
    self._stopwatch = stopwatch or Stopwatch(STEP)
    self._settled = self._since = time.perf_counter()
    self._steps_since, self._phase = 0, 0
    self._skipped_in_a_row = 0

  @property
  def diverged(self) -> str:
    over = self._skipped_in_a_row >= self._cfg.training.max_skipped_steps
    return describe_divergence(self._skipped_in_a_row) if over else ""

  def _count_step(self, step: int, metrics: dict[str, Any]) -> None:
    """Count a step for the speed of its phase, which starts anew when the phase changes."""
    phase = int(metrics.get("phase", 0))
    if phase != self._phase:
      self._since, self._steps_since, self._phase = self._settled, 0, phase
    self._settled = time.perf_counter()
    self._steps_since += 1
    self._skipped_in_a_row = int(metrics["skipped_in_a_row"])

  def _write(
    self, step: int, metrics: dict[str, Any], evaluation: Callable[[], dict[str, float]] | None
  ) -> None:
    seconds = (self._settled - self._since) / self._steps_since
    phase = self._plan.phases[self._phase] if self._plan else None
    row = self._row(step, metrics, seconds, self._flops[self._phase], phase)
    if evaluation:
      with self._stopwatch.during("evaluation"):
        row |= evaluation()
    row |= self._stopwatch.row()
    self._writers[0].write(row, metrics.get("expert_load"))
    self._settled = self._since = time.perf_counter()
    self._steps_since = 0


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
