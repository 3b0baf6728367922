"""The loop: the whole life of a run, top to bottom."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from maxlite.data.batch import to_global
from maxlite.data.pipeline import Data, TrainStream
from maxlite.observe.chips import peak_bf16_tflops
from maxlite.observe.flops import train_flops_per_step
from maxlite.observe.metrics import training_row
from maxlite.observe.profiler import Profiler
from maxlite.observe.writers import Writers
from maxlite.storage.checkpoint import Checkpoints
from maxlite.training.evaluate import evaluate
from maxlite.training.setup import Trainer
from maxlite.training.signals import stop_on_signals
from maxlite.training.state import TrainState


@dataclasses.dataclass(frozen=True)
class Run:
  """What the loop works with."""

  trainer: Trainer
  data: Data
  checkpoints: Checkpoints | None
  writers: Writers
  profiler: Profiler


@dataclasses.dataclass(frozen=True)
class Ending:
  """Where a run stands when its loop returns, and why it returned."""

  state: TrainState
  step: int
  reason: str  # empty when all steps were taken
  exit_code: int


def train(run: Run, state: TrainState, stream: TrainStream, first_step: int) -> Ending:
  """Takes steps `first_step` to cfg.run.steps; returns earlier when told to stop or diverging."""
  cfg = run.trainer.cfg
  last_step = cfg.run.steps
  log = StepLog(run)
  evaluation = _evaluation(run)
  step, reason, exit_code = first_step - 1, "", 0
  with stop_on_signals() as stop:
    for step in range(first_step, last_step + 1):
      run.profiler.before_step()
      batch = to_global(next(stream), run.trainer.batch_sharding, run.trainer.batch_shape)
      state, metrics = run.trainer.train_step(state, batch)
      run.profiler.after_step(metrics)
      log.add(step, metrics)
      if evaluation and (step == last_step or _due(step, cfg.observe.eval_period)):
        log.settle(lambda params=state.params: evaluation(params))
      if log.skipped_in_a_row >= cfg.training.max_skipped_steps:
        reason, exit_code = _diverged(log.skipped_in_a_row), 1
      if stop.received:
        reason, exit_code = f"stopped by {stop.received.name}", 128 + stop.received
      if reason or step == last_step or _due(step, cfg.checkpoint.checkpoint_period):
        log.settle()
        _save(run, step, state, stream)
      if reason:
        break
  log.settle()
  return Ending(state, step, reason, exit_code)


class StepLog:
  """Writes a step's metrics while the device works on the next one."""

  def __init__(self, run: Run):
    self._run = run
    self._pending: tuple[int, dict[str, Any]] | None = None
    self._since = time.perf_counter()
    self._steps_since = 0
    self.skipped_in_a_row = 0
    cfg = run.trainer.cfg
    tokens = run.trainer.batch_shape[0] * run.trainer.batch_shape[1]
    flops = train_flops_per_step(cfg.model, tokens, cfg.data.max_target_length)
    self._speed = {
      "num_devices": run.trainer.mesh.size,
      "flops_per_step": flops.total,
      "peak_tflops": peak_bf16_tflops(run.trainer.mesh.devices.flat[0].device_kind),
    }

  def add(self, step: int, metrics: dict[str, Any]) -> None:
    """Takes the metrics of `step`, which is under way, and settles those of the step before."""
    self.settle()
    self._pending = (step, metrics)

  def settle(self, evaluation: Callable[[], dict[str, float]] | None = None) -> None:
    """Waits for the pending step and writes its row, if it is due, with `evaluation`'s figures."""
    if self._pending is None:
      return
    step, metrics = self._pending
    self._pending = None
    numbers = jax.device_get(metrics)
    self._steps_since += 1
    self.skipped_in_a_row = int(numbers["skipped_in_a_row"])
    cfg = self._run.trainer.cfg
    if not evaluation and step not in (1, cfg.run.steps) and not _due(step, cfg.observe.log_period):
      return
    seconds = (time.perf_counter() - self._since) / self._steps_since
    row = training_row(step, numbers, step_seconds=seconds, **self._speed)
    row |= evaluation() if evaluation else {}
    self._run.writers.write(row, numbers.get("expert_load"))
    self._since, self._steps_since = time.perf_counter(), 0


def _due(step: int, period: int) -> bool:
  return period > 0 and step % period == 0


def _diverged(num_steps: int) -> str:
  return (
    f"loss or gradient was not finite in {num_steps} steps in a row (max_skipped_steps): lower "
    "learning_rate, or start again from an earlier checkpoint"
  )


def _evaluation(run: Run) -> Callable[[Any], dict[str, float]] | None:
  if run.data.source.eval is None:
    return None
  eval_step = run.trainer.eval_step(run.data.source.num_bytes_V)
  num_batches = run.trainer.cfg.observe.eval_steps
  return lambda params: evaluate(run.trainer, eval_step, params, run.data.eval_batches(num_batches))


def _save(run: Run, step: int, state: TrainState, stream: TrainStream) -> None:
  """Rows are on disk before the checkpoint that makes a resumed run skip them."""
  if run.checkpoints is not None:
    run.writers.flush()
    run.checkpoints.save(step, state, stream.state())
