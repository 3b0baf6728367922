"""Optimizers, learning-rate schedules and partitions of the parameters."""

from maxlite.optim.build import build_optimizer, learning_rate
from maxlite.optim.schedules import build_schedule, with_schedule_steps

__all__ = ["build_optimizer", "build_schedule", "learning_rate", "with_schedule_steps"]
