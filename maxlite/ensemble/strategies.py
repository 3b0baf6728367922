"""The strategies: each builds an engine for the same members."""

import numpy as np
from jax.sharding import Mesh

from maxlite.ensemble.engines.batched_jaxpr import group_by_jaxpr
from maxlite.ensemble.engines.engine_base import EngineRequest, require_no_phases
from maxlite.ensemble.engines.stacked import VmapEngine
from maxlite.ensemble.member_program import abstract_states


def build_stacked(request: EngineRequest, *, sizes: bool = False) -> VmapEngine:
  """All members as one program; several devices get an equal number of members each.

  Raises:
    JaxprMismatchError: the members differ in more than literals (and `sizes`).
  """
  devices, mesh = request.devices, None
  num_members = len(request.costs)
  if not request.spread:
    num_parts = max(n for n in range(1, len(devices) + 1) if num_members % n == 0)
    mesh = Mesh(np.array(devices[:num_parts]), ("ensemble",)) if num_parts > 1 else None
    devices = devices[:1]
  programs = request.build(devices)
  require_no_phases(programs)
  return VmapEngine(request, programs, [list(range(num_members))], sizes=sizes, mesh=mesh)


def build_padded(request: EngineRequest) -> VmapEngine:
  """All members as one program on padded arrays; raises as `build_stacked`."""
  return build_stacked(request, sizes=True)


def build_fused(request: EngineRequest) -> VmapEngine:
  """Groups of members that differ in literals only, and each member with phases alone."""
  programs = request.build(request.devices if request.spread else request.devices[:1])
  plain = [z for z, program in enumerate(programs) if not program.has_phases]
  groups = group_by_jaxpr(
    [programs[z].step for z in plain],
    [programs[z].name for z in plain],
    abstract_states([programs[z] for z in plain]),
    request.batch,
  )
  with_phases = [[z] for z, program in enumerate(programs) if program.has_phases]
  return VmapEngine(
    request, programs, [[plain[n] for n in group] for group in groups] + with_phases
  )
