"""Learning rates by number of updates."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.slow_cases import slow

from maxlite.config.schema import DEFAULTS, OptimizerConfig, build
from maxlite.optim import build_schedule
from maxlite.optim.schedules import schedule_numbers
from maxlite.registry import SCHEDULES

PEAK = 0.02
STEPS = 100
WARMUP = 10
FINAL = 0.002


def rates(kind, **changes):
  """Learning rates of updates 0 to STEPS; the last one is after the schedule's end."""
  cfg = build(
    OptimizerConfig,
    DEFAULTS
    | {
      "lr_schedule_type": kind,
      "learning_rate": PEAK,
      "learning_rate_schedule_steps": STEPS,
      "wsd_decay_steps_fraction": 0.2,
    }
    | changes,
  )
  schedule = build_schedule(cfg)
  return np.array([schedule(np.float32(i)) for i in range(STEPS + 1)], np.float32)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_warmup_rises_linearly_from_above_zero_to_the_peak(kind):
  rate = rates(kind)
  np.testing.assert_allclose(rate[:WARMUP], PEAK * np.arange(1, WARMUP + 1) / WARMUP, rtol=1e-6)
  assert rate[WARMUP] == rate.max() == np.float32(PEAK)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_rate_never_rises_after_warmup_and_ends_at_the_final_value(kind):
  rate = rates(kind)
  assert (np.diff(rate[WARMUP:]) <= 0).all()
  assert rate[-1] == pytest.approx(PEAK if kind == "constant" else FINAL, rel=1e-6)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("fraction", [0.0, 0.01, 1.0])
def test_warmup_of_zero_one_or_all_updates(kind, fraction):
  rate = rates(kind, warmup_steps_fraction=fraction)
  assert rate.min() > 0
  assert rate.max() == np.float32(PEAK)
  assert rate[STEPS - 1 if fraction == 1 else 0] == np.float32(PEAK)


def test_cosine_schedule_follows_a_cosine():
  progress = np.arange(STEPS - WARMUP + 1) / (STEPS - WARMUP)
  expected = FINAL + (PEAK - FINAL) * (1 + np.cos(np.pi * progress)) / 2
  np.testing.assert_allclose(rates("cosine")[WARMUP:], expected, rtol=1e-5)


def test_wsd_is_constant_and_then_linear():
  rate = rates("wsd")
  assert (rate[WARMUP:81] == np.float32(PEAK)).all()
  np.testing.assert_allclose(rate[80:], np.linspace(PEAK, FINAL, 21), rtol=1e-5)


def test_wsd_decay_limited_by_warmup():
  rate = rates("wsd", warmup_steps_fraction=0.9)
  assert rate[89] == rate[90] == np.float32(PEAK)
  assert rate[-1] == pytest.approx(FINAL, rel=1e-6)


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(
  ("steps", "fraction"), [(100, 0.1), slow(7, 0.5), slow(30, 0.05), (9, 0.0), (5, 1)]
)
def test_lengths_in_arrays_give_the_schedule_of_the_numbers(kind, steps, fraction):
  """As in the state of an optimizer; 30 x 0.05 and 7 x 0.5 are halfway between two integers."""
  cfg = build(
    OptimizerConfig,
    DEFAULTS
    | {
      "lr_schedule_type": kind,
      "learning_rate_schedule_steps": steps,
      "warmup_steps_fraction": fraction,
      "wsd_decay_steps_fraction": 0.3,
    },
  )
  numbers = {name: jnp.float32(value) for name, value in schedule_numbers(cfg).items()}
  with_arrays = build_schedule(dataclasses.replace(cfg, **numbers))
  count = np.arange(steps + 2, dtype=np.float32)
  np.testing.assert_allclose(with_arrays(count), build_schedule(cfg)(count), rtol=1e-6)


def optax_schedule(cfg):
  """The same by optax's own schedules."""
  total = cfg.learning_rate_schedule_steps
  warmup = round(total * cfg.warmup_steps_fraction)
  rise = optax.linear_schedule(cfg.learning_rate / warmup, cfg.learning_rate, warmup - 1)
  decay = optax.cosine_decay_schedule(
    cfg.learning_rate, total - warmup, alpha=cfg.learning_rate_final_fraction
  )
  return optax.join_schedules([rise, decay], [warmup])


def test_the_cosine_schedule_has_the_bits_of_optax():
  cfg = build(OptimizerConfig, DEFAULTS | {"learning_rate_schedule_steps": 200})
  count = np.arange(202, dtype=np.int32)
  with jax.numpy_dtype_promotion("standard"):
    ours = jax.jit(build_schedule(cfg))(count)
    theirs = jax.jit(optax_schedule(cfg))(count)
  np.testing.assert_array_equal(ours, theirs)
