"""The contract of engines, and the request from which they are built."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.step_cost import ProgramCost, StepCost, program_cost
from maxlite.ensemble.member_program import MemberFactory, MemberProgram, abstract_states


@dataclasses.dataclass(frozen=True)
class EngineRequest:
  """The members, their data and their devices."""

  build: Callable[[Sequence[jax.Device]], Sequence[MemberProgram]]  # for members on these devices
  batch: Any  # of one member; may be abstract
  devices: Sequence[jax.Device]
  spread: bool = False  # each member is itself sharded over all devices
  own_batches: bool = False  # a step takes a batch per member, stacked
  finish: Callable[[list], Any] = lambda metrics: metrics  # of the members' metrics, compiled
  factory: MemberFactory | None = None  # builds the members in other processes

  @functools.cached_property
  def costs(self) -> list[ProgramCost]:
    """The cost of every member's step on one device."""
    return step_costs(self.build(self.devices[:1]), self.batch)


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
    self.abstract = abstract_states(self.programs)

  def result_shapes(self, method: str, inputs: Any) -> list[Any]:
    """Per member, the shapes of what `method` returns."""
    return [
      jax.eval_shape(getattr(program, method), state, inputs)
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]


def step_costs(programs: Sequence[MemberProgram], batch: Any) -> list[ProgramCost]:
  states = abstract_states(programs)
  return [
    program_cost(jax.make_jaxpr(program.step)(state, batch))
    for program, state in zip(programs, states, strict=True)
  ]


def jit_init(init: Callable, **keywords: Any) -> Any:
  """`jax.jit` of a function that runs once.

  On CPUs, this optimization level takes half of the compile time and returns the same bits; level 0
  rounds differently.
  """
  on_cpu = jax.default_backend() == "cpu"
  options = {"xla_backend_optimization_level": 1} if on_cpu else None
  return jax.jit(init, compiler_options=options, **keywords)


def require_no_phases(programs: Sequence[MemberProgram]) -> None:
  """Raise UserError if a member has phases: under vmap or switch it would compute all of them."""
  for program in programs:
    if program.has_phases:
      raise UserError(f"{program.name} has phases; use fused, submesh or processes")
