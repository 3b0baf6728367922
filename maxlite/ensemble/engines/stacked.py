"""Members in one compiled step: the engine of the strategies stacked and fused.

Members with equal modules form a group, which member_group.py lifts along the axis `ensemble`. A
group of one member runs the program of its solo run unchanged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.engine_base import (
  NO_COST,
  EngineRequest,
  EnsembleEngine,
  MemberCost,
  Placement,
  StackMetrics,
  StepCost,
  stack_common,
  tree_bytes,
)
from maxlite.ensemble.engines.group_trees import take_row, without_paths
from maxlite.ensemble.engines.grouping import NotAlikeError, describe_difference, group_members
from maxlite.ensemble.engines.member_group import MemberGroup
from maxlite.ensemble.engines.solo_group import SoloGroup
from maxlite.ensemble.engines.stack_placement import StackPlacement
from maxlite.ensemble.member_program import MemberProgram
from maxlite.kernels.xla_cpu import jit_init
from maxlite.phases.phase_programs import compile_in_parallel
from maxlite.step.train_state import TrainState


class StackedEngine(EnsembleEngine):
  """Groups of members in one step; the state is a list with that of every group."""

  def __init__(
    self,
    request: EngineRequest,
    programs: Sequence[MemberProgram],
    groups: list[list[int]],
    mesh: Mesh | None = None,
  ):
    """
    Args:
      groups: indices of programs, by group.
      mesh: with an axis `ensemble`, over which the one group of members is sharded; of members
        whose modules have no mesh themselves.
    """
    super().__init__(request, programs)
    self.indices = groups
    self.groups = [self._build_group(group) for group in groups]
    self._placement = StackPlacement(self.groups, mesh)
    self._order_Z = np.argsort(np.concatenate(groups)).tolist()
    self.shardings = [self._placement.state(group) for group in self.groups]
    results = self._placement.replicated if request.spans_processes else None
    self.step = jax.jit(
      self._step,
      in_shardings=(self.shardings, self._placement.batch(request.own_batches)),
      out_shardings=(self.shardings, results),
      donate_argnums=0,
    )
    self._predict_groups = jax.jit(self._predict, static_argnames="method", out_shardings=results)
    self._gathered_shardings = [self._placement.gathered(group) for group in self.groups]
    self._take = [self._jit_take(group) for group in self.groups]

  def _build_group(self, group: list[int]) -> MemberGroup | SoloGroup:
    programs = [self.programs[z] for z in group]
    if len(programs) == 1:
      return SoloGroup(programs[0], own_batches=self.request.own_batches)
    members = MemberGroup(programs, own_batches=self.request.own_batches)
    degree = 1 if members.axis is None else members.functions.sharder.num_shards("ensemble")
    if len(programs) % degree:
      raise UserError(
        f"{len(programs)} members that are alike do not divide over "
        f"ici_ensemble_parallelism={degree}"
      )
    return members

  def init(self) -> list[Any]:
    """The state before the first step, by one program per group."""
    params = []
    for group in self.groups:
      read = group.programs[0].base_params
      params.append(None if read is None else read())
    lowered = (
      jit_init(group.init, out_shardings=sharding).lower(own)
      for group, sharding, own in zip(self.groups, self.shardings, params, strict=True)
    )
    compiled = compile_in_parallel(lowered)
    return [program(own) for program, own in zip(compiled, params, strict=True)]

  def pack(self, states: Sequence[TrainState]) -> list[Any]:
    """Raise UserError if members of one group differ in parameters that are held once."""
    if not self.request.spread and not self.request.spans_processes:
      states = jax.device_get(list(states))  # they may be on other devices
    by_group = [[states[z] for z in group] for group in self.indices]
    for group, own in zip(self.groups, by_group, strict=True):
      group.check_shared(own)

    def stack(by_group: list[list[TrainState]]) -> list[Any]:
      return [group.stack(own) for group, own in zip(self.groups, by_group, strict=True)]

    return jax.jit(stack, out_shardings=self.shardings)(by_group)

  def take(self, state: list[Any], z: int) -> TrainState:
    """The solo state of member z: copies, since the next step donates the state."""
    number, _ = self._place_of(z)
    held = _copy(self.groups[number].held(state[number]))
    return self._take_with_held(state, z, held)

  def unpack(self, state: list[Any]) -> list[TrainState]:
    """The solo states of all members, which share one copy of what their group holds once.

    A stack over devices is gathered once for all of them.
    """
    held = [_copy(group.held(own)) for group, own in zip(self.groups, state, strict=True)]
    gathered = []
    for own, sharding in zip(state, self._gathered_shardings, strict=True):
      gathered.append(own if sharding is None else jax.jit(_copy, out_shardings=sharding)(own))
    states = []
    for z in range(len(self.programs)):
      number, _ = self._place_of(z)
      states.append(self._take_with_held(gathered, z, held[number]))
    return states

  def _take_with_held(self, state: list[Any], z: int, held: Any) -> TrainState:
    number, row = self._place_of(z)
    return self.groups[number].with_held(self._take[number](state[number], row), held)

  def _place_of(self, z: int) -> tuple[int, int]:
    """(number of the group, row in it) of a member."""
    for number, group in enumerate(self.indices):
      if z in group:
        return number, group.index(z)
    raise IndexError(z)

  def _jit_take(self, group: MemberGroup | SoloGroup) -> Callable[[Any, int], TrainState]:
    """The solo state of a row; one program for all rows where they have one optimizer."""
    static = () if isinstance(group, MemberGroup) and group.has_one_optimizer else (1,)
    shardings = group.programs[0].shardings
    if shardings is not None:
      shardings = shardings.replace(params=without_paths(shardings.params, group.shared_paths))
    elif self.request.spans_processes:
      shardings = self._placement.replicated
    return jax.jit(group.take, static_argnums=static, out_shardings=shardings)

  def predict(self, state: list[Any], inputs: Any, method: str = "predict") -> list[Any]:
    by_group = self._predict_groups(state, inputs, method=method)
    results = []
    for z in range(len(self.programs)):
      number, row = self._place_of(z)
      results.append(take_row(by_group[number], row))
    return results

  def place(self, batch: Any, *, own_batches: bool = False) -> Any:
    if not self.request.spans_processes:
      return batch
    sharding = self._placement.batch(own_batches)
    members = (len(self.programs),) if own_batches else ()

    def assemble(local: np.ndarray, one: Any) -> jax.Array:
      shape = (*members, *one.shape)
      return jax.make_array_from_process_local_data(sharding, local, shape)

    return jax.tree.map(assemble, batch, self.request.batch)

  def step_cost(self) -> StepCost:
    costs = self.member_costs()
    num_devices = self._placement.num_devices
    total = sum(costs, NO_COST)
    # The members of a group share operations.
    operations = sum(costs[group[0]].operations for group in self.indices)
    state_bytes = sum(tree_bytes(state) for state in self.abstract)
    state_bytes -= sum(group.bytes_saved for group in self.groups)
    return StepCost(
      on_device=MemberCost(total.flops / num_devices, operations, total.bytes / num_devices),
      total=MemberCost(total.flops, operations * num_devices, total.bytes),
      num_devices=num_devices,
      num_programs=1,
      operations_compiled=operations,
      state_bytes=state_bytes / num_devices,
    )

  def _step(self, state: list[Any], batch: Any) -> tuple[list[Any], StackMetrics]:
    batches = [self._batch_of(group, batch) for group in self.indices]
    steps = [group.step for group in self.groups]
    results = self._run_groups(steps, state, batches)
    metrics = [self._placement.on_all_devices(metrics) for _, metrics in results]
    return [new_state for new_state, _ in results], self._join(metrics)

  def _join(self, by_group: list[dict[str, jax.Array]]) -> StackMetrics:
    common = stack_common(by_group, self._order_Z)
    own = []
    for z in range(len(self.programs)):
      number, row = self._place_of(z)
      others = {name: x for name, x in by_group[number].items() if name not in common}
      own.append(take_row(others, row))
    return StackMetrics(common, own)

  def _predict(self, state: list[Any], inputs: Any, method: str) -> list[Any]:
    functions = [functools.partial(group.predict, method=method) for group in self.groups]
    results = self._run_groups(functions, state, [inputs] * len(self.groups))
    return [self._placement.on_all_devices(result) for result in results]

  def _run_groups(
    self, functions: Sequence[Callable], states: list[Any], inputs: list[Any]
  ) -> list[Any]:
    """Per group, functions[g](states[g], inputs[g]).

    Devices that XLA:CPU simulates would start the collectives of independent groups in different
    orders and wait for each other forever: there, each group waits for the results of the one
    before it.
    """
    in_order = self.request.spread and self.request.devices[0].platform == "cpu"
    results: list[Any] = []
    for group, function in enumerate(functions):
      operands = states[group], inputs[group]
      if results and in_order:
        operands, _ = jax.lax.optimization_barrier((operands, results[-1]))
      results.append(function(*operands))
    return results

  def _batch_of(self, group: list[int], batch: Any) -> Any:
    """The part of a step's batch that the group reads."""
    return take_row(batch, np.asarray(group)) if self.request.own_batches else batch

  def trace(self) -> None:
    """Trace the step for its first call, which does not trace it again.

    Raises:
      NotImplementedError: the members' modules have an operation that JAX cannot vmap.
    """
    batch = self.request.batch
    if self.request.own_batches:
      count = len(self.programs)
      batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), batch)
    if self.request.spans_processes:
      batch = _with_shardings(batch, self._placement.batch(self.request.own_batches))
    # Without the shardings, the types of the arrays would lack the mesh that those of the first
    # call have, and the step would be traced again.
    states = []
    for group, sharding in zip(self.groups, self.shardings, strict=True):
      states.append(_with_shardings(group.abstract_state, sharding))
    self.step.eval_shape(states, batch)


def _with_shardings(tree: Any, shardings: Any) -> Any:
  """The abstract arrays with shardings.

  Args:
    shardings: a tree of them, or one for all arrays; None: none.
  """
  if shardings is None:
    return tree

  def shard_all(sharding: NamedSharding, part: Any) -> Any:
    def shard(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shard, part)

  return jax.tree.map(shard_all, shardings, tree)


def _copy(tree: Any) -> Any:
  return jax.tree.map(jnp.copy, tree)


def build_stacked(request: EngineRequest) -> StackedEngine:
  """All members as one group; several devices get an equal number of members each.

  Raises:
    NotAlikeError: the members have modules that compute different functions.
  """
  placement = request.placement_of_one if request.spread else _member_placement(request)
  programs = request.build(placement)
  groups = group_members(programs)
  if len(groups) > 1:
    raise NotAlikeError(describe_difference(programs[0], programs[groups[1][0]]))
  mesh = None
  if len(placement.devices) > 1 and programs[0].functions.sharder is None:
    shape = (placement.num_parts, placement.copies)
    mesh = Mesh(np.array(placement.devices).reshape(shape), ("ensemble", "copy"))
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
  devices = request.devices
  num_parts = max(n for n in range(1, len(devices) + 1) if request.num_members % n == 0)
  copies = len(devices) // num_parts if request.spans_processes else 1
  count = num_parts * copies
  chosen = tuple(devices[n * len(devices) // count] for n in range(count))
  return Placement(chosen, num_parts, copies)
