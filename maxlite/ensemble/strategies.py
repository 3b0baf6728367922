"""The strategies: each makes an engine of the same members, and all engines keep one contract.

An engine has `programs`, `init() -> state`, `step(state, batch) -> (state, metrics)`,
`predict(state, inputs) -> [per member]`, `unpack(state) -> [per member]` and `pack` back.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.batched_jaxpr import group_alike
from maxlite.ensemble.engines.jaxpr_comparison import trace
from maxlite.ensemble.engines.processes import Processes
from maxlite.ensemble.engines.stacked import Groups
from maxlite.ensemble.engines.step_cost import Cost, cost_of
from maxlite.ensemble.engines.submesh import Submesh
from maxlite.ensemble.engines.switched import Switched
from maxlite.ensemble.factory import Factory
from maxlite.ensemble.member_program import Program, abstract_states

Build = Callable[[Sequence[jax.Device]], Sequence[Program]]


@dataclasses.dataclass(frozen=True)
class Request:
  """What an engine is made for."""

  build: Build  # all members' programs for a member that has these devices
  batch: Any  # what one member gets at a step; it need only be described
  devices: Sequence[jax.Device]
  spread: bool = False  # whether each member is itself cut over all devices
  own_batches: bool = False  # whether a step gets a batch per member, stacked
  finish: Callable[[list], Any] = lambda metrics: metrics  # of the members' metrics, compiled
  factory: Factory | None = None  # by which other processes can make the members

  @functools.cached_property
  def costs(self) -> list[Cost]:
    """Of every member's step, alone on one device."""
    programs = self.build(self.devices[:1])
    states = abstract_states(programs)
    return [
      cost_of(trace(program.step, state, self.batch)[0])
      for program, state in zip(programs, states, strict=True)
    ]

  @property
  def common(self) -> dict[str, Any]:
    return {"own_batches": self.own_batches, "finish": self.finish}


def build_stacked(request: Request) -> Groups:
  """All members as one program. Raises NotAlikeError where they differ in more than numbers."""
  return _one_group(request, sizes=False)


def build_padded(request: Request) -> Groups:
  """All members as one padded program. Raises NotAlikeError where they differ beyond sizes."""
  return _one_group(request, sizes=True)


def build_fused(request: Request) -> Groups:
  """Members that are alike stacked, all groups in one program; alone, who has phases."""
  programs = request.build(request.devices if request.spread else request.devices[:1])
  turning = [z for z, program in enumerate(programs) if program.has_phases]
  others = [z for z, program in enumerate(programs) if not program.has_phases]
  steps, names = ([getattr(programs[z], what) for z in others] for what in ("step", "name"))
  states = abstract_states([programs[z] for z in others])
  alike = group_alike(steps, names, states, request.batch)
  groups = [[others[n] for n in group] for group in alike] + [[z] for z in turning]
  return Groups(programs, request.batch, groups, **request.common)


def build_switched(request: Request) -> Switched:
  """A member per device. Raises UserError where there are fewer devices than members."""
  programs = request.build(request.devices[:1])
  _refuse_phases(programs)
  return Switched(programs, request.batch, devices=request.devices, **request.common)


def build_submesh(request: Request) -> Submesh:
  """Members dealt out over parts of the devices."""
  return Submesh(
    request.build, request.batch, devices=request.devices, costs=request.costs, **request.common
  )


def build_processes(request: Request) -> Processes:
  """Members dealt out over processes. Raises UserError where these could not make them."""
  if request.factory is None:
    raise UserError(
      "another process cannot make members that are given as objects; use Ensemble.from_factory"
    )
  programs = request.build(request.devices[:1])
  common = {"costs": request.costs, "devices": request.devices, **request.common}
  return Processes(programs, request.batch, request.factory, **common)


STRATEGIES: dict[str, Callable[[Request], Any]] = {
  "stacked": build_stacked,
  "fused": build_fused,
  "padded": build_padded,
  "switched": build_switched,
  "submesh": build_submesh,
  "processes": build_processes,
}


def _refuse_phases(programs: Sequence[Program]) -> None:
  """Raises UserError where members take turns: together, all would compute all phases."""
  for program in programs:
    if program.has_phases:
      raise UserError(f"{program.name} has phases; use fused, submesh or processes")


def _one_group(request: Request, *, sizes: bool) -> Groups:
  """On several devices, each takes an equal share of the members."""
  devices, mesh = request.devices, None
  count = len(request.costs)
  if not request.spread:
    parts = max(n for n in range(1, len(devices) + 1) if count % n == 0)
    mesh = Mesh(np.array(devices[:parts]), ("ensemble",)) if parts > 1 else None
    devices = devices[:1]
  programs = request.build(devices)
  _refuse_phases(programs)
  group = [list(range(count))]
  return Groups(programs, request.batch, group, sizes=sizes, mesh=mesh, **request.common)
