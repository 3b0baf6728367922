"""Learning-rate schedules: a linear warm-up, then a schedule from the table."""

import dataclasses

import optax

from maxlite.config.registry import SCHEDULES
from maxlite.config.schema import OptimizerConfig


def cosine(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
  final = cfg.learning_rate_final_fraction
  return optax.cosine_decay_schedule(cfg.learning_rate, max(steps, 1), alpha=final)


def wsd(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
  """Constant, then linear decay. Source: Hu et al., MiniCPM (2024), section 4.2."""
  total = cfg.learning_rate_schedule_steps
  decay_steps = min(round(total * cfg.wsd_decay_steps_fraction), steps)
  final = cfg.learning_rate * cfg.learning_rate_final_fraction
  decay = optax.linear_schedule(cfg.learning_rate, final, max(decay_steps, 1))
  plateau = optax.constant_schedule(cfg.learning_rate)
  return optax.join_schedules([plateau, decay], [steps - decay_steps])


def constant(cfg: OptimizerConfig, steps: int) -> optax.Schedule:
  del steps
  return optax.constant_schedule(cfg.learning_rate)


def build_schedule(cfg: OptimizerConfig) -> optax.Schedule:
  """Build the learning rate by number of updates; `learning_rate_schedule_steps` must be > 0.

  The rate of the first update is above zero: warm-up update i of w has (i + 1) / w of the peak.
  """
  total = cfg.learning_rate_schedule_steps
  warmup = round(total * cfg.warmup_steps_fraction)
  schedule = SCHEDULES[cfg.lr_schedule_type](cfg, total - warmup)
  if warmup == 0:
    return schedule
  rise = optax.linear_schedule(cfg.learning_rate / warmup, cfg.learning_rate, max(warmup - 1, 1))
  return optax.join_schedules([rise, schedule], [warmup])


def with_schedule_steps(cfg: OptimizerConfig, steps: int) -> OptimizerConfig:
  """Return `cfg` with a schedule of `steps` updates if `learning_rate_schedule_steps` is -1."""
  if cfg.learning_rate_schedule_steps != -1:
    return cfg
  return dataclasses.replace(cfg, learning_rate_schedule_steps=steps)
