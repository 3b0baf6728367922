"""From gradients to new weights: schedules, which parameters get what, and the optimizers table."""

from maxlite.optim.build import OPTIMIZERS, build_optimizer
from maxlite.optim.schedules import SCHEDULES, build_schedule, with_schedule_steps

__all__ = ["OPTIMIZERS", "SCHEDULES", "build_optimizer", "build_schedule", "with_schedule_steps"]
