"""What a training step optimises: one objective for a run, or one per phase."""

import dataclasses
import functools
from collections.abc import Callable, Collection

import jax
import optax

from maxlite.config.schema import DataConfig, ModelConfig, PhaseConfig, TrainingConfig
from maxlite.errors import UserError
from maxlite.optim import build_optimizer, learning_rate, with_schedule_steps
from maxlite.optim.labels import Labels, partitioned, split
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.training.batch_shape import batch_shape


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """A loss of a part of the parameters, its optimizer and its batches."""

  # The name of the phase, or "train" in a run without phases.
  name: str
  data: DataConfig
  training: TrainingConfig
  # A name in the table LOSSES.
  loss: str
  # What is trained and what is frozen; None: all parameters are trained.
  labels: Labels
  # The optimizer of the trained parameters.
  tx: optax.GradientTransformation
  # The learning rate of the next update, from the optimizer state.
  learning_rate: Callable[[PyTree], jax.Array]
  # Rows over all devices, and positions.
  batch_shape: tuple[int, int]
  # The number of updates in the run, by which the schedule is built.
  num_updates: int
  # The number of updates on each batch.
  repeat_batch: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class ObjectiveBuilder:
  """Builds the objectives of one model."""

  model: ModelConfig
  names: PyTree  # The logical axis names of the parameters.
  sharder: Sharder
  stored_numbers: Collection[str] = ()  # Numbers of the optimizers that are in their states.

  def build(self, phase: PhaseConfig, *, num_updates: int, labels: Labels) -> Objective:
    """Build the objective of a phase, or of the whole run.

    Args:
      num_updates: the number of updates in the run, by which the schedule is built.
      labels: of the parameters; None: all are trained.

    Raises:
      UserError: the batches of the phase do not fit the mesh.
    """
    optimizer = with_schedule_steps(phase.optimizer, num_updates)
    try:
      shape = batch_shape(phase.data, phase.training, self.sharder)
    except UserError as error:
      raise UserError(f"phase {phase.name}: {error}") from None
    trained_names, _ = split(self.names, labels)
    tx = build_optimizer(optimizer, trained_names, self.model, self.stored_numbers)
    return Objective(
      name=phase.name,
      data=phase.data,
      training=phase.training,
      loss=phase.loss,
      labels=labels,
      tx=partitioned(tx, labels),
      learning_rate=functools.partial(learning_rate, optimizer),
      batch_shape=shape,
      num_updates=num_updates,
      repeat_batch=phase.repeat_batch,
    )
