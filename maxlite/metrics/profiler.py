"""A trace of a few steps, for XProf or Perfetto."""

from pathlib import Path
from typing import Any

import jax

from maxlite.config.schema import ObserveConfig


class Profiler:
  """Traces the steps the config asks for, counted from the first step this process executes.

  The loop calls `before_step` and `after_step` around every step, and `close` however it ends.
  """

  def __init__(self, cfg: ObserveConfig, directory: Path):
    self._directory = directory
    self._enabled = cfg.profiler != ""
    self._first = cfg.skip_first_n_steps_for_profiler
    self._end = self._first + cfg.profiler_steps
    self._num_steps = 0
    self._tracing = False

  def before_step(self) -> None:
    if self._enabled and self._num_steps == self._first:
      jax.profiler.start_trace(self._directory)
      self._tracing = True

  def after_step(self, outputs: Any) -> None:
    """Counts the step; `outputs` are waited for when the trace ends, so that it holds all of it."""
    self._num_steps += 1
    if self._tracing and self._num_steps == self._end:
      jax.block_until_ready(outputs)
      self.close()

  def close(self) -> None:
    """Ends a trace that is running, and keeps it."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
