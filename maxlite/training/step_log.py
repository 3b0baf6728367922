"""The log of training steps: metrics become rows while the devices run the next step."""

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from maxlite.config import Config
from maxlite.config.phases import PhaseConfig
from maxlite.metrics.best_loss import BestLoss
from maxlite.metrics.chips import peak_bf16_tflops
from maxlite.metrics.goodput import STEP, Stopwatch
from maxlite.metrics.step_row import training_row
from maxlite.metrics.writers import Writers
from maxlite.phases.phase_plan import losses_by_phase
from maxlite.training.callbacks import Callback
from maxlite.training.trainer import Trainer


class Log(abc.ABC):
  """Writes the metrics of a step while the devices run the next one."""

  def __init__(self, cfg: Config, writers: Sequence[Writers], devices: Sequence[jax.Device]):
    self._cfg, self._writers = cfg, writers
    self.best = BestLoss()
    self._pending: tuple[int, Any] | None = None
    self._is_first = True  # no step of this process has ended: its speed includes compilation
    self._since, self._steps_since = time.perf_counter(), 0
    peak_tflops = peak_bf16_tflops(devices[0].device_kind)
    self._devices = {"num_devices": len(devices), "peak_tflops": peak_tflops}

  @property
  @abc.abstractmethod
  def diverged(self) -> str:
    """Why training cannot continue; empty if it can."""

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
    if evaluation or self._is_first or step == last or due(step, observe.log_period):
      self._write(step, metrics, evaluation)
      self._since, self._steps_since = time.perf_counter(), 0
    self._is_first = False

  def flush(self) -> None:
    """Return when all rows written so far would survive a crash."""
    for writers in self._writers:
      writers.flush()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """While open, time does not count as that of a step."""
    start = time.perf_counter()
    yield
    self._since += time.perf_counter() - start

  def _step_seconds(self, now: float) -> float | None:
    """Mean over the steps since the last row; None for the first step of this process."""
    return None if self._is_first else (now - self._since) / self._steps_since

  def _row(
    self, step: int, metrics: dict, seconds: float | None, flops: float, phase: PhaseConfig | None
  ) -> dict[str, Any]:
    row = training_row(step, metrics, step_seconds=seconds, flops_per_step=flops, **self._devices)
    return row | (losses_by_phase(phase, row) if phase else {})

  @abc.abstractmethod
  def _count_step(self, step: int, metrics: Any) -> None:
    """Count a finished step, whether or not its row is due."""

  @abc.abstractmethod
  def _write(self, step: int, metrics: Any, evaluation: Callable[[], Any] | None) -> None:
    """Write the row or rows of a step, with the held-out results."""


class StepLog(Log):
  """The log of one model."""

  def __init__(
    self,
    trainer: Trainer,
    writers: Writers,
    timer: Stopwatch | None = None,
    best: BestLoss | None = None,
    callbacks: Sequence[Callback] = (),
  ):
    super().__init__(trainer.cfg, [writers], list(trainer.mesh.devices.flat))
    self.best, self._callbacks = best or self.best, callbacks
    self._plan, self._flops = trainer.phase_plan, trainer.flops_per_step
    self._schedule, self._shapes = trainer.batch_schedule, trainer.batch_schedule.shapes
    if len(self._shapes) > 1:
      self._flops = [trainer.flops_of(trainer.objectives[0], shape) for shape in self._shapes]
    self._timer = timer or Stopwatch(STEP)
    self._settled, self._program = self._since, 0
    self._skipped_in_a_row = 0

  @property
  def diverged(self) -> str:
    over = self._skipped_in_a_row >= self._cfg.training.max_skipped_steps
    return describe_divergence(self._skipped_in_a_row) if over else ""

  def _count_step(self, step: int, metrics: dict[str, Any]) -> None:
    """Count a step for the speed of its program: of its phase, or of its batch's shape."""
    program = int(metrics.get("phase", self._shapes.index(self._schedule.shape(step - 1))))
    if program != self._program:
      self._since, self._steps_since, self._program = self._settled, 0, program
    self._settled = time.perf_counter()
    self._steps_since += 1
    self._skipped_in_a_row = int(metrics["skipped_in_a_row"])

  def _write(
    self, step: int, metrics: dict[str, Any], evaluation: Callable[[], dict[str, float]] | None
  ) -> None:
    seconds = self._step_seconds(self._settled)
    phase = self._plan.phases[self._program] if self._plan else None
    row = self._row(step, metrics, seconds, self._flops[self._program], phase)
    if evaluation:
      with self._timer.during("evaluation"):
        row |= evaluation()
    row |= self._timer.row()
    self._writers[0].write(row, metrics.get("expert_load"))
    self.best.add(row)
    for callback in self._callbacks:
      callback.on_row(row)
    self._settled = time.perf_counter()


def due(step: int, period: int) -> bool:
  return period > 0 and step % period == 0


def describe_divergence(num_steps: int) -> str:
  return (
    f"loss or gradient was not finite in {num_steps} steps in a row (max_skipped_steps): lower "
    "learning_rate, or start again from an earlier checkpoint"
  )
