"""What a training step optimises: one objective for a run, or one per phase."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

from maxlite.config.errors import UserError
from maxlite.config.phases import PhaseConfig
from maxlite.config.schema import Config, DataConfig, TrainingConfig
from maxlite.optim import build_optimizer, learning_rate, with_schedule_steps
from maxlite.optim.labels import ALL_PARAMETERS, Partition
from maxlite.phases.phase_plan import PhasePlan
from maxlite.sharding import Sharder
from maxlite.training.batch_shape import batch_shape


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """A loss of a partition of the parameters, its optimizer and its batches."""

  name: str  # of the phase; "train" in a run without phases
  data: DataConfig
  training: TrainingConfig
  loss: str  # a name in LOSSES
  partition: Partition
  tx: optax.GradientTransformation
  learning_rate: Callable[[Any, jax.Array], jax.Array]  # of (optimizer state, number of updates)
  batch_shape: tuple[int, int]  # rows over all devices, positions


def build_objectives(
  cfg: Config, plan: PhasePlan | None, names: Any, sharder: Sharder
) -> list[Objective]:
  """Build the objective of every phase, or the one of a run without phases.

  Args:
    names: logical axis names of the parameters.
  """
  num_steps = cfg.run.steps
  build_tx = lambda optimizer, partition: build_optimizer(
    optimizer, partition.split(names)[0], cfg.model
  )
  if plan is None:
    sections = {"optimizer": cfg.optimizer, "training": cfg.training, "data": cfg.data}
    whole = PhaseConfig("train", (".*",), cfg.training.loss_type, num_steps, None, **sections)
    return [_build_objective(whole, num_steps, ALL_PARAMETERS, build_tx, sharder)]
  part_of = lambda phase: (plan.num_steps(phase, num_steps), plan.partitions[phase.name])
  return [_build_objective(phase, *part_of(phase), build_tx, sharder) for phase in plan.phases]


def _build_objective(
  phase: PhaseConfig, num_steps: int, partition: Partition, build_tx: Callable, sharder: Sharder
) -> Objective:
  optimizer = with_schedule_steps(phase.optimizer, num_steps)
  try:
    shape = batch_shape(phase.data, phase.training, sharder)
  except UserError as error:
    raise UserError(f"phase {phase.name}: {error}") from None
  tx, rate = build_tx(optimizer, partition), functools.partial(learning_rate, optimizer)
  of_phase = phase.name, phase.data, phase.training, phase.loss
  return Objective(*of_phase, partition, tx, rate, shape)
