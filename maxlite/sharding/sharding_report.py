"""The sharding of each parameter on a mesh, and checks of it."""

import dataclasses
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec

from maxlite.errors import UserError
from maxlite.sharding.logical_axis_rules import LogicalNames, Sharder


@dataclasses.dataclass(frozen=True)
class ParameterSharding:
  """One parameter on a mesh."""

  path: str
  shape: tuple[int, ...]
  dtype: np.dtype
  names: LogicalNames
  spec: PartitionSpec
  num_shards: int

  @property
  def num_bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize

  @property
  def bytes_per_device(self) -> int:
    return self.num_bytes // self.num_shards


def parameter_sharding(
  path: str, leaf: jax.ShapeDtypeStruct, names: LogicalNames, sharder: Sharder
) -> ParameterSharding:
  """The sharding of a parameter whose axes have these logical names.

  Raises:
    UserError: the size of an axis is not divisible by its number of shards.
  """
  for axis, name in enumerate(names):
    shards = sharder.num_shards(name)
    if leaf.shape[axis] % shards:
      degrees = sharder.mesh_axes(name)
      product = " x ".join(f"{axis}={sharder.mesh.shape[axis]}" for axis in degrees)
      keys = " or ".join(f"ici_{axis}_parallelism" for axis in degrees)
      raise UserError(
        f"parameter {path} of shape {tuple(leaf.shape)}: its axis {name!r} of {leaf.shape[axis]} "
        f"is not divisible by {product}: change {keys}, or that dimension of the model"
      )
  return ParameterSharding(
    path=path,
    shape=tuple(leaf.shape),
    dtype=np.dtype(leaf.dtype),
    names=tuple(names),
    spec=sharder.spec(names),
    num_shards=math.prod(sharder.num_shards(name) for name in names),
  )


def check_sharded(
  parameters: Sequence[ParameterSharding], sharder: Sharder, tolerance: float
) -> None:
  """Checks that at most the share `tolerance` of the parameter bytes is unsharded.

  Raises:
    UserError: the share is larger, on a mesh that shards parameters.
  """
  if math.prod(sharder.num_shards(name) for name in ("embed", "mlp")) == 1:
    return
  unsharded = [parameter for parameter in parameters if parameter.num_shards == 1]
  unsharded_bytes = sum(parameter.num_bytes for parameter in unsharded)
  share = unsharded_bytes / sum(parameter.num_bytes for parameter in parameters)
  if share > tolerance:
    largest = max(unsharded, key=lambda parameter: parameter.num_bytes)
    raise UserError(
      f"{share:.1%} of parameter bytes are unsharded on every device, the largest {largest.path} "
      f"{largest.shape}; sharding_tolerance allows {tolerance:.1%}: change logical_axis_rules or "
      "raise sharding_tolerance"
    )
