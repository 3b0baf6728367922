"""The strategies stacked and fused: which members run where, in the engine of stacked.py."""

import numpy as np
from jax.sharding import Mesh

from maxlite.ensemble.engines.engine_base import EngineRequest, Placement, largest_divisor
from maxlite.ensemble.engines.grouping import NotAlikeError, describe_difference, group_members
from maxlite.ensemble.engines.stacked import StackedEngine
from maxlite.errors import UserError


def build_stacked(request: EngineRequest) -> StackedEngine:
  """All members as one group; several devices get an equal number of members each.

  Raises:
    NotAlikeError: the members have modules that compute different functions.
  """
  if request.spread:
    placement = request.placement_of_one
  else:
    placement = _member_placement(request)
  programs = request.build(placement)
  groups = group_members(programs)
  if len(groups) > 1:
    first_other = groups[1][0]
    raise NotAlikeError(describe_difference(programs[0], programs[first_other]))
  mesh = None
  if len(placement.devices) > 1 and programs[0].functions.sharder is None:
    devices = np.array(placement.devices)
    shape = (placement.num_parts, placement.copies)
    mesh = Mesh(devices.reshape(shape), ("ensemble", "copy"))
  return StackedEngine(request, programs, groups, mesh)


def build_fused(request: EngineRequest) -> StackedEngine:
  """A group for each module that members have."""
  if request.spans_processes and not request.spread:
    raise UserError(
      "over several processes each member uses all devices or a part of the mesh: write "
      "ici_ensemble_parallelism=1, or a number below that of the devices"
    )
  programs = request.build()
  return StackedEngine(request, programs, group_members(programs))


def _member_placement(request: EngineRequest) -> Placement:
  """Equal numbers of members for as many devices as divide them.

  Devices of other processes that are left over repeat a member, because all processes take part.
  """
  num_devices = len(request.devices)
  num_parts = largest_divisor(request.num_members, num_devices)
  copies = 1
  if request.spans_processes:
    copies = num_devices // num_parts
  num_chosen = num_parts * copies
  chosen = []
  for n in range(num_chosen):  # spread evenly, so that every process has some
    chosen.append(request.devices[n * num_devices // num_chosen])
  return Placement(tuple(chosen), num_parts, copies)
