"""Optimizers, learning-rate schedules and partitions of the parameters."""

from maxlite.optim.build import (
  build_optimizer,
  hyperparameters,
  learning_rate,
  with_hyperparameters,
)
from maxlite.optim.schedules import build_schedule, with_schedule_steps

__all__ = [
  "build_optimizer",
  "build_schedule",
  "hyperparameters",
  "learning_rate",
  "with_hyperparameters",
  "with_schedule_steps",
]
