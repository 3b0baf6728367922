"""The contract of engines, and the request from which they are built."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from maxlite.config.errors import UserError
from maxlite.ensemble.member import MemberFactory
from maxlite.ensemble.member_program import MemberProgram
from maxlite.step.train_state import TrainState

OPERATIONS_PER_ARRAY = 30  # of a step, per array of parameters: a rough count, to rank strategies


class Placement(NamedTuple):
  """Where a member's program runs, or a stack of members."""

  devices: tuple[jax.Device, ...]
  num_parts: int = 1  # of the devices, each of which holds a part of the members
  copies: int = 1  # of a part, which repeat its computation


class StackMetrics(NamedTuple):
  """What a step reports."""

  common: dict[str, jax.Array]  # {name: [Z]} of the scalars that all members have
  own: list[dict[str, jax.Array]]  # by member, all others

  def of_member(self, z: int) -> dict[str, jax.Array]:
    """All that the step of member z reports."""
    return {name: values_Z[z] for name, values_Z in self.common.items()} | self.own[z]


@dataclasses.dataclass(frozen=True)
class MemberCost:
  """The cost of one member's step, from shapes; its parts add up for members in one program."""

  flops: float  # of matrix products
  operations: float  # started on a device
  bytes: float  # read and written

  def __add__(self, other: "MemberCost") -> "MemberCost":
    return MemberCost(
      self.flops + other.flops, self.operations + other.operations, self.bytes + other.bytes
    )


NO_COST = MemberCost(0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class StepCost:
  """The cost of a step of an engine."""

  on_device: MemberCost  # on the busiest device
  total: MemberCost  # over all devices
  num_devices: int
  num_programs: int  # calls, in total
  operations_compiled: float
  state_bytes: float  # on the fullest device


@dataclasses.dataclass(frozen=True)
class EngineRequest:
  """The members, their data and their devices."""

  num_members: int
  program: Callable[[int, Placement], MemberProgram]  # of a member on these devices
  batch: Any  # of one member; may be abstract
  devices: Sequence[jax.Device]
  spread: bool = False  # each member is itself sharded over all devices
  own_batches: bool = False  # a step takes a batch per member, stacked
  factory: MemberFactory | None = None  # builds the members in other processes
  # Why there is none.
  no_factory: str = (
    "another process cannot build members that are given as objects; use Ensemble.from_factory"
  )

  @property
  def spans_processes(self) -> bool:
    return len({device.process_index for device in self.devices}) > 1

  @property
  def placement_of_one(self) -> Placement:
    """The devices of a member's own program."""
    return Placement(tuple(self.devices if self.spread else self.devices[:1]))

  def build(self, placement: Placement | None = None) -> list[MemberProgram]:
    """The programs of all members, each on all of these devices."""
    placement = placement or self.placement_of_one
    return [self.program(z, placement) for z in range(self.num_members)]


class EnsembleEngine:
  """Base of engines; subclasses define the methods below and the form of the state."""

  init: Callable[[], Any]  # () -> state
  step: Callable[[Any, Any], tuple[Any, StackMetrics]]  # (state, batch); donates the state
  predict: Callable[..., list]  # (state, inputs, method="predict") -> its result for each member
  pack: Callable[[Sequence[Any]], Any]  # every member's solo state -> state
  take: Callable[[Any, int], TrainState]  # (state, z) -> the solo state of member z
  step_cost: Callable[[], StepCost]

  def __init__(self, request: EngineRequest, programs: Sequence[MemberProgram]):
    self.request = request
    self.programs = list(programs)

  @functools.cached_property
  def abstract(self) -> list[TrainState]:
    """Per member, shapes and dtypes of the state of its solo run."""
    return [program.abstract_state for program in self.programs]

  def unpack(self, state: Any) -> list[TrainState]:
    """The solo states of all members."""
    return [self.take(state, z) for z in range(len(self.programs))]

  def place(self, batch: Any, *, own_batches: bool = False) -> Any:
    """The global batch from this process's rows; engines of one process place it in `step`.

    Args:
      own_batches: `batch` has a batch per member, stacked.
    """
    del own_batches
    return batch

  def result_shapes(self, method: str, inputs: Any) -> list[Any]:
    """Per member, the shapes of what `method` of its functions returns."""
    return [
      jax.eval_shape(getattr(program.functions, method), state, inputs)
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]

  def trace(self) -> None:
    """Trace the step, where it may turn out that JAX cannot."""

  def member_costs(self) -> list[MemberCost]:
    """The cost of every member's step."""
    by_shape: dict[int, MemberCost] = {}
    costs = []
    for program, state in zip(self.programs, self.abstract, strict=True):
      if id(state) not in by_shape:
        by_shape[id(state)] = _member_cost(state, program.flops, self.request.batch)
      costs.append(by_shape[id(state)])
    return costs

  def cost_of_separate_programs(self, parts: Sequence[Sequence[int]], size: int = 1) -> StepCost:
    """The cost of a program per member, on separate parts of the devices.

    Args:
      parts: the members on each part.
      size: number of devices in a part.
    """
    costs = self.member_costs()
    by_part = [sum((costs[z] for z in part), NO_COST) for part in parts]
    busiest = max(by_part, key=lambda cost: cost.flops + cost.bytes)
    state_bytes = [sum(tree_bytes(self.abstract[z]) for z in part) for part in parts]
    return StepCost(
      on_device=share_of_device(busiest, size),
      total=sum(by_part, NO_COST),
      num_devices=len(parts) * size,
      num_programs=len(costs),
      operations_compiled=sum(cost.operations for cost in costs),
      state_bytes=max(state_bytes) / size,
    )


def _member_cost(state: TrainState, flops: Sequence[float], batch: Any) -> MemberCost:
  arrays = jax.tree.leaves(state.params)
  leaves = jax.tree.leaves(batch)
  num_rows = leaves[0].shape[0] if leaves and leaves[0].shape else 1
  num_parameters = sum(array.size for array in arrays)
  return MemberCost(
    flops=flops[0] if flops else 6.0 * num_rows * num_parameters,
    operations=float(OPERATIONS_PER_ARRAY * len(arrays)),
    bytes=6.0 * tree_bytes(state),
  )


def share_of_device(cost: MemberCost, num_devices: float) -> MemberCost:
  """The share of one of the devices over which a program is sharded."""
  return MemberCost(cost.flops / num_devices, cost.operations, cost.bytes / num_devices)


def tree_bytes(tree: Any) -> float:
  """The size of all arrays, which may be abstract."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    total += math.prod(leaf.shape) * leaf.dtype.itemsize
  return float(total)


def require_one_process(request: EngineRequest) -> None:
  """Raise UserError if the devices belong to several processes."""
  if request.spans_processes:
    raise UserError("it runs in one process; over several, use stacked or fused")


def stack_common(by_group: Sequence[dict], order_Z: Sequence[int]) -> dict[str, jax.Array]:
  """{name: [Z]} of the scalars that all members have, in the order of the members.

  Args:
    by_group: {name: [members of the group, ...]}.
    order_Z: for every member, its position in the concatenated groups.
  """
  common = {}
  for name, first in by_group[0].items():
    values = [metrics[name] for metrics in by_group if name in metrics]
    if len(values) == len(by_group) and all(value.ndim == 1 for value in values):
      joined = jax.numpy.concatenate(values) if len(values) > 1 else first
      is_ordered = list(order_Z) == list(range(len(order_Z)))
      common[name] = joined if is_ordered else joined[jax.numpy.asarray(order_Z)]
  return common
