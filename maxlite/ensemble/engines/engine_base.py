"""The contract of engines, and the request from which they are built."""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax

from maxlite.ensemble.members.member import MemberFactory
from maxlite.ensemble.members.program import MemberProgram
from maxlite.errors import UserError
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState

Metrics = dict[str, jax.Array]  # by name

# Operations of a step per array of parameters: a rough count, which suffices to rank strategies.
OPERATIONS_PER_ARRAY = 30


class Placement(NamedTuple):
  """Where a member's program runs, or a stack of members."""

  devices: tuple[jax.Device, ...]
  num_parts: int = 1  # parts of the devices, each of which holds a part of the members
  copies: int = 1  # devices that repeat the computation of each part


class StackMetrics(NamedTuple):
  """What a step reports."""

  common: Metrics  # the scalars that all members report, [Z]
  own: list[Metrics]  # by member, all other metrics

  def of_member(self, z: int) -> Metrics:
    """All that the step of member z reports."""
    metrics = {}
    for name, values_Z in self.common.items():
      metrics[name] = values_Z[z]
    metrics.update(self.own[z])
    return metrics


@dataclasses.dataclass(frozen=True)
class MemberCost:
  """The cost of one member's step, from shapes; its parts add up for members in one program."""

  flops: float  # floating-point operations of matrix products
  operations: float  # operations that are started on a device
  bytes: float  # bytes that are read and written

  def __add__(self, other: "MemberCost") -> "MemberCost":
    return MemberCost(
      flops=self.flops + other.flops,
      operations=self.operations + other.operations,
      bytes=self.bytes + other.bytes,
    )


NO_COST = MemberCost(flops=0.0, operations=0.0, bytes=0.0)


def total_cost(costs: Iterable[MemberCost]) -> MemberCost:
  """The sum of the costs."""
  return sum(costs, NO_COST)


@dataclasses.dataclass(frozen=True)
class StepCost:
  """The cost of a step of an engine."""

  on_device: MemberCost  # the cost on the busiest device
  total: MemberCost  # the sum over all devices
  num_devices: int
  num_programs: int  # calls of compiled programs on all devices together
  operations_compiled: float  # operations of the programs that are compiled
  state_bytes: float  # bytes of the members' states on the fullest device


@dataclasses.dataclass(frozen=True)
class EngineRequest:
  """The members, their data and their devices."""

  num_members: int
  # (number of a member, devices) -> its program on these devices
  program: Callable[[int, Placement], MemberProgram]
  batch: PyTree  # one member's batch, which may be abstract
  devices: Sequence[jax.Device]
  spread: bool = False  # whether each member is itself sharded over all devices
  own_batches: bool = False  # whether a step takes a batch per member, stacked
  factory: MemberFactory | None = None  # builds the members in other processes
  # Why there is no factory, for an error message.
  no_factory: str = (
    "another process cannot build members that are given as objects; use Ensemble.from_factory"
  )

  @property
  def spans_processes(self) -> bool:
    """Whether the devices belong to several processes."""
    processes = {device.process_index for device in self.devices}
    return len(processes) > 1

  @property
  def placement_of_one(self) -> Placement:
    """The devices of a member's own program."""
    return own_placement(self.devices, spread=self.spread)

  def build(self, placement: Placement | None = None) -> list[MemberProgram]:
    """The programs of all members, each on all of these devices."""
    if placement is None:
      placement = self.placement_of_one
    return [self.program(z, placement) for z in range(self.num_members)]


def own_placement(devices: Sequence[jax.Device], *, spread: bool) -> Placement:
  """The devices of the program of one member.

  Args:
    spread: whether a member is sharded over all devices; otherwise it is on the first one.
  """
  if spread:
    return Placement(tuple(devices))
  return Placement((devices[0],))


class EnsembleEngine(abc.ABC):
  """Trains members by one strategy; the form of the state is the engine's."""

  def __init__(self, request: EngineRequest, programs: Sequence[MemberProgram]):
    self.request = request
    self.programs = list(programs)
    self._solo_predict: dict[Callable, Callable] = {}  # jitted, by the function

  @abc.abstractmethod
  def init(self) -> PyTree:
    """The state before the first step."""

  @abc.abstractmethod
  def step(self, state: PyTree, batch: PyTree) -> tuple[PyTree, StackMetrics]:
    """The state after a step, and what it reports; donates `state`."""

  @abc.abstractmethod
  def predict(self, state: PyTree, inputs: PyTree, method: str = "predict") -> list[PyTree]:
    """Per member, the result of its function `method`."""

  @abc.abstractmethod
  def pack(self, states: Sequence[TrainState]) -> PyTree:
    """The state from the members' solo states."""

  @abc.abstractmethod
  def take(self, state: PyTree, z: int) -> TrainState:
    """The solo state of member z: copies, since the next step donates `state`."""

  @abc.abstractmethod
  def step_cost(self) -> StepCost:
    """The cost of a step, from shapes."""

  def predict_members(
    self,
    state: PyTree,
    inputs: PyTree,
    members: Sequence[int],
    *,
    own_inputs: bool,
  ) -> list[PyTree]:
    """The predictions of these members, which may repeat, by their solo functions.

    Args:
      own_inputs: `inputs` has an entry for each of `members`.
    """
    if len(set(members)) == 1:
      states = {members[0]: self.take(state, members[0])}
    else:
      states = dict(enumerate(self.unpack(state)))
    results = []
    for n, z in enumerate(members):
      function = self.programs[z].functions.predict
      if function not in self._solo_predict:
        self._solo_predict[function] = jax.jit(function)
      own = jax.tree.map(lambda leaf, n=n: leaf[n], inputs) if own_inputs else inputs
      results.append(self._solo_predict[function](states[z], own))
    return results

  @functools.cached_property
  def abstract(self) -> list[TrainState]:
    """Per member, shapes and dtypes of the state of its solo run."""
    return [program.abstract_state for program in self.programs]

  def unpack(self, state: PyTree) -> list[TrainState]:
    """The solo states of all members."""
    return [self.take(state, z) for z in range(len(self.programs))]

  def place(self, batch: PyTree, *, own_batches: bool = False) -> PyTree:
    """The global batch from this process's rows; engines of one process place it in `step`.

    Args:
      own_batches: `batch` has a batch per member, stacked.
    """
    del own_batches
    return batch

  def result_shapes(self, method: str, inputs: PyTree) -> list[PyTree]:
    """Per member, the shapes of what `method` of its functions returns."""
    return [
      jax.eval_shape(getattr(program.functions, method), state, inputs)
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]

  def trace(self) -> None:  # noqa: B027 (only engines that use vmap override it)
    """Trace the step, where it may turn out that JAX cannot."""

  def member_costs(self) -> list[MemberCost]:
    """The cost of every member's step."""
    by_state: dict[int, MemberCost] = {}  # members of a group share their abstract state
    costs = []
    for program, state in zip(self.programs, self.abstract, strict=True):
      key = id(state)
      if key not in by_state:
        by_state[key] = _member_cost(state, program.flops, self.request.batch)
      costs.append(by_state[key])
    return costs

  def cost_of_separate_programs(self, parts: Sequence[Sequence[int]], size: int = 1) -> StepCost:
    """The cost of a program per member, on separate parts of the devices.

    Args:
      parts: the members on each part.
      size: number of devices in a part.
    """
    costs = self.member_costs()
    cost_of_part = []
    bytes_of_part = []
    for part in parts:
      cost_of_part.append(total_cost(costs[z] for z in part))
      bytes_of_part.append(sum(tree_bytes(self.abstract[z]) for z in part))
    busiest = max(cost_of_part, key=lambda cost: cost.flops + cost.bytes)
    return StepCost(
      on_device=share_of_device(busiest, size),
      total=total_cost(cost_of_part),
      num_devices=len(parts) * size,
      num_programs=len(costs),
      operations_compiled=sum(cost.operations for cost in costs),
      state_bytes=max(bytes_of_part) / size,
    )


def _member_cost(state: TrainState, flops: Sequence[float], batch: PyTree) -> MemberCost:
  """The cost of a member's step.

  Args:
    flops: by phase, as in `MemberProgram`. Without them, a matrix product per row and parameter is
      counted, forward and, at twice its cost, backward.
  """
  arrays = jax.tree.leaves(state.params)
  if flops:
    flops_of_step = flops[0]
  else:
    num_parameters = sum(array.size for array in arrays)
    flops_of_step = 6.0 * _num_rows(batch) * num_parameters
  return MemberCost(
    flops=flops_of_step,
    operations=float(OPERATIONS_PER_ARRAY * len(arrays)),
    bytes=6.0 * tree_bytes(state),
  )


def _num_rows(batch: PyTree) -> int:
  """The size of the first axis of a batch; 1 if it has none."""
  leaves = jax.tree.leaves(batch)
  if not leaves or not leaves[0].shape:
    return 1
  return leaves[0].shape[0]


def share_of_device(cost: MemberCost, num_devices: float) -> MemberCost:
  """The share of one of the devices over which a program is sharded."""
  return MemberCost(
    flops=cost.flops / num_devices,
    operations=cost.operations,
    bytes=cost.bytes / num_devices,
  )


def tree_bytes(tree: PyTree) -> float:
  """The size of all arrays, which may be abstract."""
  total = 0
  for leaf in jax.tree.leaves(tree):
    total += math.prod(leaf.shape) * leaf.dtype.itemsize
  return float(total)


def require_one_process(request: EngineRequest) -> None:
  """Raise UserError if the devices belong to several processes."""
  if request.spans_processes:
    raise UserError("it runs in one process; over several, use stacked or fused")


def largest_divisor(number: int, limit: int) -> int:
  """The largest divisor of `number` that is at most `limit`."""
  for divisor in range(limit, 1, -1):
    if number % divisor == 0:
      return divisor
  return 1
