"""Profiler traces of a few steps, for XProf or Perfetto."""

from pathlib import Path

import jax

from maxlite.config.schema import ObserveConfig
from maxlite.sharding.pytree import PyTree


class Profiler:
  """Traces the configured steps, counted from the first step of this process.

  The loop calls `before_step` and `after_step` around every step, and `close` on every exit.
  """

  def __init__(self, cfg: ObserveConfig, directory: Path):
    self._directory = directory
    self._num_steps = 0
    self._tracing = False
    self._traced = range(0)
    if cfg.profiler:
      first = cfg.skip_first_n_steps_for_profiler
      self._traced = range(first, first + cfg.profiler_steps)

  def before_step(self) -> None:
    if self._traced and self._num_steps == self._traced.start:
      jax.profiler.start_trace(self._directory)
      self._tracing = True

  def after_step(self, outputs: PyTree) -> None:
    """Count the step; at the end of the trace, first wait for `outputs` so that it is complete."""
    self._num_steps += 1
    if self._tracing and self._num_steps == self._traced.stop:
      jax.block_until_ready(outputs)
      self.close()

  def close(self) -> None:
    """Stop and save a running trace."""
    if self._tracing:
      self._tracing = False
      jax.profiler.stop_trace()
