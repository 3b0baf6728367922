"""What a training step optimises: one objective for a run, or one per phase."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from maxlite.config.errors import UserError
from maxlite.config.phases import PhaseConfig
from maxlite.config.schema import Config, DataConfig, TrainingConfig
from maxlite.optim import build_optimizer, learning_rate, with_schedule_steps
from maxlite.optim.partition import ALL_PARAMETERS, Partition
from maxlite.phases.phase_plan import PhasePlan
from maxlite.sharding import Sharder


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


def batch_shape(data: DataConfig, training: TrainingConfig, sharder: Sharder) -> tuple[int, int]:
  """(rows over all devices, positions) of a batch.

  Raises:
    UserError: rows or positions do not divide by the mesh and the micro-batches.
  """
  num_shards = sharder.num_shards("activation_batch")
  rows = global_batch_size(
    data, sharder.mesh.size, num_shards, training.gradient_accumulation_steps
  )
  shards = sharder.num_shards("activation_length")
  for length in (data.max_target_length, *(n for _, n in data.sequence_length_schedule)):
    if length % shards:
      key = "max_target_length" if length == data.max_target_length else "sequence_length_schedule"
      raise UserError(
        f"{key}={length} does not divide by the {shards} shards of the context axis: "
        f"set it to {math.ceil(length / shards) * shards}, or change ici_context_parallelism"
      )
  return rows, data.max_target_length


def global_batch_size(
  data: DataConfig, num_devices: int, num_shards: int = 1, num_micro: int = 1
) -> int:
  """Rows of a batch over all devices, of the largest in a schedule.

  Raises:
    UserError: they are not a multiple of `num_shards` x `num_micro`.
  """
  fixed = data.global_batch_size or data.per_device_batch_size * num_devices
  sizes = [rows for _, rows in data.batch_size_schedule] or [fixed]
  multiple = num_shards * num_micro
  rows = next((each for each in sizes if each % multiple), None)
  if rows is None:
    return round(max(sizes))
  nearest = max(round(rows / multiple), 1) * multiple
  given = f"per_device_batch_size={data.per_device_batch_size:g} x {num_devices} devices = "
  fix = f"per_device_batch_size={nearest / num_devices:g} ({nearest} rows)"
  if data.global_batch_size:
    given, fix = "global_batch_size: ", f"global_batch_size={nearest}"
  if data.batch_size_schedule:
    given, fix = "batch_size_schedule: ", f"{nearest}"
  raise UserError(
    f"{given}{rows:g} rows do not divide by {multiple} ({num_shards} shards of the "
    f"batch x gradient_accumulation_steps={num_micro}); the nearest that does is {fix}"
  )
