"""From gradients to new weights: schedules, which parameters get what, and the optimizers table."""

from maxlite.optim.build import build_optimizer
from maxlite.optim.schedules import build_schedule, with_schedule_steps

__all__ = ["build_optimizer", "build_schedule", "with_schedule_steps"]
