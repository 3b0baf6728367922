"""The number of rows and positions of a batch over all devices."""

import math

from maxlite.config.schema import DataConfig
from maxlite.errors import UserError
from maxlite.sharding import Sharder


def batch_shape(
  data: DataConfig, num_micro: int, sharder: Sharder, *, deterministic: bool = False
) -> tuple[int, int]:
  """(rows over all devices, positions) of a batch of `num_micro` micro-batches.

  Args:
    deterministic: whether every micro-batch is computed by one device.

  Raises:
    UserError: rows or positions do not divide by the mesh and the micro-batches.
  """
  num_row_shards = sharder.num_shards("activation_batch")
  if deterministic:
    if num_micro % num_row_shards:
      nearest = math.ceil(num_micro / num_row_shards) * num_row_shards
      raise UserError(
        f"gradient_accumulation_steps={num_micro} with deterministic_reductions=true: a device "
        f"computes whole micro-batches, but {num_row_shards} devices share the rows; write "
        f"gradient_accumulation_steps={nearest}"
      )
    num_row_shards = 1
  rows = global_batch_size(
    data,
    num_devices=sharder.mesh.size,
    num_shards=num_row_shards,
    num_micro=num_micro,
  )
  num_shards = sharder.num_shards("activation_length")
  _check_length("max_target_length", data.max_target_length, num_shards)
  for _, length in data.sequence_length_schedule:
    _check_length("sequence_length_schedule", length, num_shards)
  return rows, data.max_target_length


def _check_length(key: str, length: int, num_shards: int) -> None:
  if length % num_shards == 0:
    return
  nearest = math.ceil(length / num_shards) * num_shards
  raise UserError(
    f"{key}={length} does not divide by the {num_shards} shards of the context axis: "
    f"set it to {nearest}, or change ici_context_parallelism"
  )


def global_batch_size(
  data: DataConfig, num_devices: int, num_shards: int = 1, num_micro: int = 1
) -> int:
  """Rows of a batch over all devices, of the largest in a schedule.

  Raises:
    UserError: they are not a multiple of `num_shards` x `num_micro`.
  """
  fixed = data.global_batch_size or data.per_device_batch_size * num_devices
  sizes: list[float] = [rows for _, rows in data.batch_size_schedule]
  if not sizes:
    sizes = [fixed]
  multiple = num_shards * num_micro
  wrong = [rows for rows in sizes if rows % multiple]
  if not wrong:
    return round(max(sizes))
  rows = wrong[0]
  nearest = max(round(rows / multiple), 1) * multiple
  if data.batch_size_schedule:
    given = "batch_size_schedule: "
    fix = f"{nearest}"
  elif data.global_batch_size:
    given = "global_batch_size: "
    fix = f"global_batch_size={nearest}"
  else:
    given = f"per_device_batch_size={data.per_device_batch_size:g} x {num_devices} devices = "
    fix = f"per_device_batch_size={nearest / num_devices:g} ({nearest} rows)"
  raise UserError(
    f"{given}{rows:g} rows do not divide by {multiple} ({num_shards} shards of the "
    f"batch x gradient_accumulation_steps={num_micro}); the nearest that does is {fix}"
  )
