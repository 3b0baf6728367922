"""The number of rows and positions of a batch over all devices."""

import math

from maxlite.config.errors import UserError
from maxlite.config.schema import DataConfig, TrainingConfig
from maxlite.sharding import Sharder


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
