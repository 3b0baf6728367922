"""What a training step optimises: one objective for a run, or one per phase."""

import dataclasses
import math
from typing import Any

import optax

from maxlite.config.errors import UserError
from maxlite.config.phases import PhaseConfig
from maxlite.config.schema import Config, DataConfig, TrainingConfig
from maxlite.optim import build_optimizer, build_schedule, with_schedule_steps
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
  schedule: optax.Schedule  # learning rate by updates
  global_batch_size: int  # rows of a batch over all devices

  @property
  def batch_shape(self) -> tuple[int, int]:
    return self.global_batch_size, self.data.max_target_length


def build_objectives(
  cfg: Config, plan: PhasePlan | None, names: Any, sharder: Sharder
) -> list[Objective]:
  """Build the objective of every phase, or the one of a run without phases.

  Args:
    names: logical axis names of the parameters.

  Raises:
    UserError: a batch does not divide by the mesh and the micro-batches.
  """
  if plan is not None:
    return [_build_objective(phase, cfg, plan, names, sharder) for phase in plan.phases]
  sections = {"optimizer": cfg.optimizer, "training": cfg.training, "data": cfg.data}
  whole = PhaseConfig("train", (".*",), "next_token", cfg.run.steps, None, **sections)
  return [_build_objective(whole, cfg, None, names, sharder)]


def _build_objective(
  phase: PhaseConfig, cfg: Config, plan: PhasePlan | None, names: Any, sharder: Sharder
) -> Objective:
  num_steps = plan.num_steps(phase, cfg.run.steps) if plan else cfg.run.steps
  partition = plan.partitions[phase.name] if plan else ALL_PARAMETERS
  optimizer = with_schedule_steps(phase.optimizer, num_steps)
  try:
    num_rows = global_batch_size(phase.data, phase.training, sharder)
  except UserError as error:
    raise UserError(f"phase {phase.name}: {error}") from None
  return Objective(
    phase.name,
    phase.data,
    phase.training,
    phase.loss,
    partition,
    build_optimizer(optimizer, partition.split(names)[0]),
    build_schedule(optimizer),
    num_rows,
  )


def global_batch_size(data: DataConfig, training: TrainingConfig, sharder: Sharder) -> int:
  """Rows of a batch over all devices.

  Raises:
    UserError: the rows or positions of a batch do not divide by the mesh and the micro-batches.
  """
  num_devices = sharder.mesh.size
  rows = data.global_batch_size or data.per_device_batch_size * num_devices
  num_micro = training.gradient_accumulation_steps
  multiple = sharder.num_shards("activation_batch") * num_micro
  if rows != round(rows) or round(rows) % multiple:
    nearest = max(round(rows / multiple), 1) * multiple
    given = f"per_device_batch_size={data.per_device_batch_size:g} x {num_devices} devices = "
    fix = f"per_device_batch_size={nearest / num_devices:g} ({nearest} rows)"
    if data.global_batch_size:
      given, fix = "global_batch_size: ", f"global_batch_size={nearest}"
    raise UserError(
      f"{given}{rows:g} rows do not divide by {multiple} ({multiple // num_micro} shards of the "
      f"batch x gradient_accumulation_steps={num_micro}); the nearest that does is {fix}"
    )
  length, shards = data.max_target_length, sharder.num_shards("activation_length")
  if length % shards:
    raise UserError(
      f"max_target_length={length} does not divide by the {shards} shards of the context axis: "
      f"set it to {math.ceil(length / shards) * shards}, or change ici_context_parallelism"
    )
  return round(rows)
