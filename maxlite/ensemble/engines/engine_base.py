"""The contract of engines, and the request from which they are built."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.step_cost import ProgramCost, StepCost, program_cost, tree_bytes
from maxlite.ensemble.member_program import MemberFactory, MemberProgram, trace


class JaxprMismatchError(UserError):
  """Error for programs that cannot run as one; the message names the first difference."""


@dataclasses.dataclass(frozen=True)
class EngineRequest:
  """The members, their data and their devices."""

  num_members: int
  program: Callable[[int, Sequence[jax.Device]], MemberProgram]  # of a member on these devices
  batch: Any  # of one member; may be abstract
  devices: Sequence[jax.Device]
  spread: bool = False  # each member is itself sharded over all devices
  own_batches: bool = False  # a step takes a batch per member, stacked
  finish: Callable[[list], Any] = lambda metrics: metrics  # of the members' metrics, compiled
  factory: MemberFactory | None = None  # builds the members in other processes
  # Why there is none.
  no_factory: str = (
    "another process cannot build members that are given as objects; use Ensemble.from_factory"
  )

  @property
  def spans_processes(self) -> bool:
    return len({device.process_index for device in self.devices}) > 1

  def build(self, devices: Sequence[jax.Device]) -> list[MemberProgram]:
    """The programs of all members, each on all of these devices."""
    return [self.program(z, devices) for z in range(self.num_members)]

  @functools.cached_property
  def costs(self) -> list[ProgramCost]:
    """The cost of every member's step on one device."""
    return program_costs(self.build(self.devices[:1]), self.batch)


class EnsembleEngine:
  """Base of engines; subclasses define the methods below and the form of the state."""

  init: Callable[[], Any]  # () -> state
  step: Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, metrics); donates state
  predict: Callable[..., list]  # (state, inputs, method="predict") -> its result for each member
  pack: Callable[[Sequence[Any]], Any]  # every member's solo state -> state
  unpack: Callable[[Any], list]  # state -> every member's solo state
  step_cost: Callable[[], StepCost]

  def __init__(self, request: EngineRequest, programs: Sequence[MemberProgram]):
    self.request, self.programs = request, list(programs)
    self.abstract = [program.abstract_state for program in programs]

  def place(self, batch: Any, *, own_batches: bool = False) -> Any:
    """The global batch from this process's rows; engines of one process place it in `step`.

    Args:
      own_batches: `batch` has a batch per member, stacked.
    """
    del own_batches
    return batch

  def separate_programs_cost(self, parts: Sequence[Sequence[int]], size: int = 1) -> StepCost:
    """The cost of a program per member, on separate parts of the devices.

    Args:
      parts: the members on each part.
      size: number of devices in a part.
    """
    costs = program_costs(self.programs, self.request.batch)
    by_part = [sum((costs[z] for z in part), ProgramCost()).per_device(size) for part in parts]
    return StepCost(
      max(by_part),
      total=sum(by_part, ProgramCost()).times(size),
      num_devices=len(parts) * size,
      num_programs=len(costs),
      operations_compiled=sum(cost.operations for cost in costs),
      state_bytes=max(tree_bytes([self.abstract[z] for z in part]) for part in parts) / size,
    )

  def result_shapes(self, method: str, inputs: Any) -> list[Any]:
    """Per member, the shapes of what `method` returns."""
    return [
      trace(getattr(program, method), state, inputs).out_info
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]


def program_costs(programs: Sequence[MemberProgram], batch: Any) -> list[ProgramCost]:
  """The cost of every member's step."""
  return [program_cost(trace(p.step, p.abstract_state, batch).jaxpr) for p in programs]


def require_one_process(request: EngineRequest) -> None:
  """Raise UserError if the devices belong to several processes."""
  if request.spans_processes:
    raise UserError("it runs in one process; over several, use stacked or fused")


def require_no_phases(programs: Sequence[MemberProgram]) -> None:
  """Raise UserError if a member has phases: under vmap or switch it would compute all of them."""
  for program in programs:
    if program.has_phases:
      raise UserError(f"{program.name} has phases; use fused, submesh or processes")
