"""Learning-rate schedules: a linear warm-up, then a schedule from the table.

A schedule is a function from the number of updates to the learning rate. An entry of the table is
called with the config and the number of updates after the warm-up. Hyperparameters may be
scalar arrays: where members of an ensemble differ in them, they are in the optimizer's state.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlite.config.schema import OptimizerConfig
from maxlite.registry import SCHEDULES

Number = Any  # a Python number or a scalar array


def cosine(cfg: OptimizerConfig, steps: Number) -> optax.Schedule:
  """Half a period of a cosine, from the peak to the final rate."""
  length = _at_least_one(steps)
  final = cfg.learning_rate_final_fraction

  def schedule(count: jax.Array) -> jax.Array:
    done = jnp.minimum(count, length)
    decay = 0.5 * (1 + jnp.cos(jnp.pi * done / length))
    return cfg.learning_rate * ((1 - final) * decay + final)

  return schedule


def wsd(cfg: OptimizerConfig, steps: Number) -> optax.Schedule:
  """Constant, then linear decay. Source: Hu et al., MiniCPM (2024), section 4.2."""
  whole_decay = _whole(cfg.learning_rate_schedule_steps * cfg.wsd_decay_steps_fraction)
  decay_steps = _smaller(whole_decay, steps)
  final = cfg.learning_rate * cfg.learning_rate_final_fraction
  decay = _linear(cfg.learning_rate, final, _at_least_one(decay_steps))
  plateau = optax.constant_schedule(cfg.learning_rate)
  return optax.join_schedules([plateau, decay], [steps - decay_steps])


def constant(cfg: OptimizerConfig, steps: Number) -> optax.Schedule:
  """The peak, for ever."""
  del steps
  return optax.constant_schedule(cfg.learning_rate)


def build_schedule(cfg: OptimizerConfig) -> optax.Schedule:
  """Build the whole schedule; `learning_rate_schedule_steps` must be above 0.

  The rate of the first update is above zero: of w warm-up updates, update i, from 0, has
  (i + 1) / w of the peak.
  """
  total = cfg.learning_rate_schedule_steps
  warmup = _whole(total * cfg.warmup_steps_fraction)
  schedule = SCHEDULES[cfg.lr_schedule_type](cfg, total - warmup)
  if isinstance(warmup, int) and warmup == 0:
    return schedule
  first_rate = cfg.learning_rate / _at_least_one(warmup)
  rise = _linear(first_rate, cfg.learning_rate, _at_least_one(warmup - 1))
  return optax.join_schedules([rise, schedule], [warmup])


def schedule_numbers(cfg: OptimizerConfig) -> dict[str, float]:
  """The keys that set the lengths of a schedule, with values that survive rounding to float32.

  A schedule rounds each fraction times the total to whole updates. A fraction in float32 could be
  rounded to another number of updates than the Python number. So each fraction is replaced by the
  number of updates that it gives, divided by the total.
  """
  total = cfg.learning_rate_schedule_steps
  warmup = round(total * cfg.warmup_steps_fraction)
  decay = min(round(total * cfg.wsd_decay_steps_fraction), total - warmup)
  return {
    "learning_rate_schedule_steps": float(total),
    "warmup_steps_fraction": warmup / total,
    "wsd_decay_steps_fraction": decay / total,
  }


def with_schedule_steps(cfg: OptimizerConfig, steps: int) -> OptimizerConfig:
  """Return `cfg` with a schedule of `steps` updates if `learning_rate_schedule_steps` is -1."""
  if isinstance(cfg.learning_rate_schedule_steps, int) and cfg.learning_rate_schedule_steps == -1:
    return dataclasses.replace(cfg, learning_rate_schedule_steps=steps)
  return cfg


def _linear(start: Number, end: Number, num_steps: Number) -> optax.Schedule:
  """From `start` to `end` in `num_steps` updates, which must be at least one."""

  def schedule(count: jax.Array) -> jax.Array:
    left = 1 - jnp.clip(count, 0, num_steps) / num_steps
    return (start - end) * left + end

  return schedule


def _whole(value: Number) -> Number:
  """The nearest integer; half-way between two, the even one."""
  if isinstance(value, jax.Array):
    return jnp.round(value)
  return round(value)


def _at_least_one(value: Number) -> Number:
  if isinstance(value, jax.Array):
    return jnp.maximum(value, 1)
  return max(value, 1)


def _smaller(left: Number, right: Number) -> Number:
  if isinstance(left, jax.Array) or isinstance(right, jax.Array):
    return jnp.minimum(left, right)
  return min(left, right)
