"""What a training step optimises: one objective for a run, or one per phase."""

import dataclasses
import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import optax

from maxlite.config.errors import UserError
from maxlite.config.phases import PhaseConfig
from maxlite.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from maxlite.optim import build_optimizer, learning_rate, with_schedule_steps
from maxlite.optim.labels import Labels, partitioned, split
from maxlite.phases.phase_plan import PhasePlan
from maxlite.sharding import Sharder
from maxlite.training.batch_shape import batch_shape


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """A loss of a part of the parameters, its optimizer and its batches."""

  name: str  # of the phase; "train" in a run without phases
  data: DataConfig
  training: TrainingConfig
  loss: str  # a name in LOSSES
  labels: Labels  # of the parameters; None in a run without phases
  tx: optax.GradientTransformation  # of the trained parameters
  learning_rate: Callable[[Any], jax.Array]  # of the next update, by the optimizer state
  batch_shape: tuple[int, int]  # rows over all devices, positions
  num_updates: int  # in the run, by which the schedule is built
  repeat_batch: int = 1  # updates on each batch


def build_objectives(
  cfg: Config,
  plan: PhasePlan | None,
  names: Any,
  sharder: Sharder,
  stored_numbers: Collection[str] = (),
) -> list[Objective]:
  """Build the objective of every phase, or the one of a run without phases.

  Args:
    names: logical axis names of the parameters.
    stored_numbers: numbers of the optimizers that are in their states.
  """
  build = functools.partial(
    _build_objective, names=names, model=cfg.model, sharder=sharder, stored_numbers=stored_numbers
  )
  if plan is None:
    whole = PhaseConfig(
      name="train",
      train=(".*",),
      loss=cfg.training.loss_type,
      steps=cfg.run.steps,
      until=None,
      optimizer=cfg.optimizer,
      training=cfg.training,
      data=cfg.data,
    )
    return [build(whole, cfg.run.steps, None)]
  objectives = []
  for phase in plan.phases:
    num_updates = plan.num_updates(phase, cfg.run.steps)
    labels = plan.labels[phase.name]
    objectives.append(build(phase, num_updates, labels))
  return objectives


def _build_objective(
  phase: PhaseConfig,
  num_updates: int,
  labels: Labels,
  names: Any,
  model: ModelConfig,
  sharder: Sharder,
  stored_numbers: Collection[str],
) -> Objective:
  optimizer = with_schedule_steps(phase.optimizer, num_updates)
  try:
    shape = batch_shape(phase.data, phase.training, sharder)
  except UserError as error:
    raise UserError(f"phase {phase.name}: {error}") from None
  trained_names, _ = split(names, labels)
  return Objective(
    name=phase.name,
    data=phase.data,
    training=phase.training,
    loss=phase.loss,
    labels=labels,
    tx=partitioned(build_optimizer(optimizer, trained_names, model, stored_numbers), labels),
    learning_rate=functools.partial(learning_rate, optimizer),
    batch_shape=shape,
    num_updates=num_updates,
    repeat_batch=phase.repeat_batch,
  )
