"""The log of training steps: metrics become rows while the devices run the next step."""

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, SupportsFloat

import jax
import numpy as np

from maxlite.config import Config
from maxlite.metrics.best_loss import BestLoss
from maxlite.metrics.chips import peak_bf16_tflops
from maxlite.metrics.goodput import STEP, Stopwatch
from maxlite.metrics.step_row import TIME, Row, training_row
from maxlite.metrics.waits import print_to_stderr
from maxlite.metrics.writers import Writers
from maxlite.sharding.pytree import PyTree
from maxlite.storage.json_values import JsonObject
from maxlite.training.callbacks import Callback
from maxlite.training.program import Program, step_flops

TOTAL_TOKENS = "total_tokens"  # in rows, and in checkpoints


class _PendingStep(NamedTuple):
  """A step that may still be running."""

  step: int
  metrics: PyTree


class Log(abc.ABC):
  """Writes the metrics of a step while the devices run the next one."""

  def __init__(self, cfg: Config, writers: Sequence[Writers], devices: Sequence[jax.Device]):
    self.best = BestLoss()
    self._cfg = cfg
    self._writers = writers
    self._num_devices = len(devices)
    self._peak_tflops = peak_bf16_tflops(devices[0].device_kind)
    self._pending: _PendingStep | None = None
    # Whether no step of this process has ended: the speed of the first includes compilation.
    self._is_first = True
    # By writers, the tokens of all steps so far; None: a checkpoint of an earlier version had none.
    self._total_tokens: list[float | None] = [0.0] * len(writers)
    # The steps whose mean speed the next row has: their start, and how many have ended.
    self._since = time.perf_counter()
    self._steps_since = 0

  @property
  @abc.abstractmethod
  def diverged(self) -> str:
    """Why training cannot continue; empty if it can."""

  def add(self, step: int, metrics: PyTree) -> None:
    """Take the metrics of `step`, which is running, and settle those of the step before."""
    self.settle()
    self._pending = _PendingStep(step, metrics)

  def settle(self, evaluation: Callable[[], PyTree] | None = None) -> None:
    """Wait for the pending step and write its row, if it is due, with the held-out results."""
    if self._pending is None:
      return
    step = self._pending.step
    metrics = jax.device_get(self._pending.metrics)
    self._pending = None
    self._count_step(step, metrics)
    if evaluation or self._is_due(step):
      self._write(step, metrics, evaluation)
      self._since = time.perf_counter()
      self._steps_since = 0
    self._is_first = False

  def _is_due(self, step: int) -> bool:
    is_last = step == self._cfg.run.steps
    return self._is_first or is_last or due(step, self._cfg.observe.log_period)

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
    if self._is_first:
      return None
    return (now - self._since) / self._steps_since

  def _count_tokens(self, index: int, num_tokens: SupportsFloat) -> None:
    """Add the tokens of a finished step of the model of the writers `index`."""
    before = self._total_tokens[index]
    if before is not None:
      self._total_tokens[index] = before + float(num_tokens)

  def _row(
    self,
    step: int,
    metrics: Mapping[str, np.ndarray],
    seconds: float | None,
    flops: float,
    index: int = 0,
  ) -> Row:
    """The row of a step, which takes this many FLOPs over all devices, for the writers `index`."""
    row = training_row(
      step,
      metrics,
      step_seconds=seconds,
      flops_per_step=flops,
      num_devices=self._num_devices,
      peak_tflops=self._peak_tflops,
    )
    total_tokens = self._total_tokens[index]
    if total_tokens is not None:
      row[TOTAL_TOKENS] = total_tokens
    row[TIME] = time.time()
    return row

  @abc.abstractmethod
  def with_totals(self, data_state: PyTree) -> PyTree:
    """The position of the data with the tokens so far, for a checkpoint."""

  @abc.abstractmethod
  def _count_step(self, step: int, metrics: PyTree) -> None:
    """Count a finished step, whether or not its row is due."""

  @abc.abstractmethod
  def _write(self, step: int, metrics: PyTree, evaluation: Callable[[], PyTree] | None) -> None:
    """Write the row or rows of a step, with the held-out results."""


class StepLog(Log):
  """The log of one model."""

  def __init__(
    self,
    cfg: Config,
    program: Program,
    writers: Writers,
    timer: Stopwatch | None = None,
    best: BestLoss | None = None,
    callbacks: Sequence[Callback] = (),
    data_state: JsonObject | None = None,
  ):
    """
    Args:
      cfg: the config of the run.
      program: the program that takes its steps.
      writers: write the rows.
      timer: attributes time to activities.
      best: the lowest held-out loss so far.
      callbacks: called with every row.
      data_state: the position of the data in the checkpoint that the run continues.
    """
    super().__init__(cfg, [writers], list(program.mesh.devices.flat))
    self._total_tokens = [total_tokens(data_state)]
    self.best = best or self.best
    self._callbacks = callbacks
    self._program = program
    self._flops = [step_flops(program, kind) for kind in program.kinds]
    self._timer = timer or Stopwatch(STEP)
    self._settled = self._since  # When the latest step ended.
    self._kind = 0  # The index of its kind.
    self._skipped_in_a_row = 0
    self._skipped_spikes: int | None = None  # None: not known yet

  @property
  def diverged(self) -> str:
    if self._skipped_in_a_row < self._cfg.training.max_skipped_steps:
      return ""
    return describe_divergence(self._skipped_in_a_row)

  def _count_step(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
    """Count a step for the speed of its kind: of its phase, or of its batch's shape."""
    kind = self._program.kind_of(step, metrics)
    if kind != self._kind:
      self._kind = kind
      self._since = self._settled
      self._steps_since = 0
    self._settled = time.perf_counter()
    self._steps_since += 1
    self._count_tokens(0, metrics["num_tokens"])
    self._skipped_in_a_row = int(metrics["skipped_in_a_row"])
    if "skipped_spikes" in metrics:
      self._report_spike(step, metrics)

  def _report_spike(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
    """Print which step was skipped as a spike: its row may not be due."""
    num_skipped = int(metrics["skipped_spikes"])
    is_new = self._skipped_spikes is not None and num_skipped > self._skipped_spikes
    self._skipped_spikes = num_skipped
    if is_new and jax.process_index() == 0:
      print_to_stderr(
        f"step {step}: skipped as a spike: loss {float(metrics['loss']):.4f}, "
        f"|grad| {float(metrics['grad_norm']):.3g}"
      )

  def _write(
    self,
    step: int,
    metrics: Mapping[str, np.ndarray],
    evaluation: Callable[[], dict[str, float]] | None,
  ) -> None:
    seconds = self._step_seconds(self._settled)
    row = self._row(step, metrics, seconds, self._flops[self._kind])
    for feature in self._program.features:
      row |= feature.add_to_row(row)
    if evaluation:
      with self._timer.during("evaluation"):
        row |= evaluation()
    row |= self._timer.row()
    self._writers[0].write(row, metrics.get("expert_load"))
    self.best.add(row)
    for callback in self._callbacks:
      callback.on_row(row)
    self._settled = time.perf_counter()

  def with_totals(self, data_state: JsonObject) -> JsonObject:
    return add_total(data_state, self._total_tokens[0])


def total_tokens(data_state: JsonObject | None) -> float | None:
  """The tokens of all steps before a checkpoint; None if it has no count, which is new.

  Args:
    data_state: the position of the data in the checkpoint; None: no step was taken.
  """
  if data_state is None:
    return 0.0
  return data_state.get(TOTAL_TOKENS)


def add_total(data_state: JsonObject, tokens: float | None) -> JsonObject:
  """`data_state` with the tokens so far, if they are known."""
  if tokens is None:
    return data_state
  return data_state | {TOTAL_TOKENS: tokens}


def due(step: int, period: int) -> bool:
  """Whether something that happens every `period` steps does after `step`; 0: never."""
  return period > 0 and step % period == 0


def describe_divergence(num_steps: int) -> str:
  return (
    f"loss or gradient was not finite in {num_steps} steps in a row (max_skipped_steps): lower "
    "learning_rate, or start again from an earlier checkpoint"
  )
