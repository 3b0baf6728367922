"""The profiler traces the configured steps, and saves a partial trace if the run ends early."""

import jax
import jax.numpy as jnp
import pytest

from maxlite.config.schema import ObserveConfig
from maxlite.metrics.profiler import Profiler


def traces(directory):
  return list(directory.rglob("*.xplane.pb"))


def run_steps(profiler, num_steps):
  step = jax.jit(lambda x: x + jnp.float32(1))
  x = jnp.zeros(())
  for _ in range(num_steps):
    profiler.before_step()
    x = step(x)
    profiler.after_step(x)


@pytest.mark.parametrize(("num_steps", "closed"), [(4, True), (3, False), (2, False)])
def test_the_trace_ends_with_its_last_step_or_the_run(tmp_path, num_steps, closed):
  cfg = ObserveConfig(profiler="xplane", skip_first_n_steps_for_profiler=1, profiler_steps=3)
  profiler = Profiler(cfg, tmp_path)
  run_steps(profiler, num_steps)
  assert len(traces(tmp_path)) == closed
  profiler.close()
  assert len(traces(tmp_path)) == 1


@pytest.mark.parametrize("cfg", [ObserveConfig(), ObserveConfig(profiler="xplane")])
def test_no_trace_unless_enabled_and_reached(tmp_path, cfg):
  profiler = Profiler(cfg, tmp_path)
  run_steps(profiler, 3)
  profiler.close()
  assert traces(tmp_path) == []
