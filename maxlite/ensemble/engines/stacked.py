"""Members in one compiled step: the engine of the strategies stacked and fused.

Members with equal modules form a group, which member_group.py lifts along the axis `ensemble`. A
group of one member runs the program of its solo run unchanged.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  MemberCost,
  Metrics,
  StackMetrics,
  StepCost,
  total_cost,
  tree_bytes,
)
from maxlite.ensemble.engines.group import Group
from maxlite.ensemble.engines.group_trees import (
  copy_tree,
  metrics_besides,
  stack_common,
  take_row,
  with_shardings,
)
from maxlite.ensemble.engines.grouping import places_of
from maxlite.ensemble.engines.member_group import MemberGroup
from maxlite.ensemble.engines.solo_group import SoloGroup
from maxlite.ensemble.engines.stack_placement import StackPlacement
from maxlite.ensemble.members.program import MemberProgram
from maxlite.errors import UserError
from maxlite.kernels.xla_cpu import jit_init
from maxlite.optim.labels import split
from maxlite.sharding.pytree import PyTree
from maxlite.step.compile import compile_in_parallel
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
      request: the members, their data and their devices.
      programs: the programs of all members.
      groups: by group, the indices of its programs.
      mesh: with an axis `ensemble`, over which the one group of members is sharded; for members
        whose modules have no mesh themselves.
    """
    super().__init__(request, programs)
    self.indices = groups
    self.groups = [self._build_group(group) for group in groups]
    self._placement = StackPlacement(self.groups, mesh)
    self._order_Z = np.argsort(np.concatenate(groups)).tolist()
    self._places = places_of(groups)
    self.shardings = [self._placement.state(group) for group in self.groups]
    batch_sharding = self._placement.batch(request.own_batches)
    results = self._placement.replicated if request.spans_processes else None
    self.jitted_step = jax.jit(
      self._step,
      in_shardings=(self.shardings, batch_sharding),
      out_shardings=(self.shardings, results),
      donate_argnums=0,
    )
    self._predict_groups = jax.jit(self._predict, static_argnames="method", out_shardings=results)
    self._predict_rows = [
      jax.jit(group.predict_rows, static_argnames="own_inputs") for group in self.groups
    ]
    self._gathered_shardings = [self._placement.gathered(group) for group in self.groups]
    self._take = [self._jit_take(group) for group in self.groups]

  def _build_group(self, group: list[int]) -> Group:
    programs = [self.programs[z] for z in group]
    if len(programs) == 1:
      return SoloGroup(programs[0], own_batches=self.request.own_batches)
    members = MemberGroup(programs, own_batches=self.request.own_batches)
    sharder = members.functions.sharder
    if sharder is not None:
      degree = sharder.num_shards("ensemble")
      if len(programs) % degree:
        raise UserError(
          f"{len(programs)} members that are alike do not divide over "
          f"ici_ensemble_parallelism={degree}"
        )
    return members

  def init(self) -> list[PyTree]:
    """The state before the first step, by one program per group."""
    starts = [group.read_start() for group in self.groups]

    def lower_each() -> Iterator[jax.stages.Lowered]:
      for group, sharding, own in zip(self.groups, self.shardings, starts, strict=True):
        yield jit_init(group.init, out_shardings=sharding).lower(own)

    compiled = compile_in_parallel(lower_each())
    return [program(own) for program, own in zip(compiled, starts, strict=True)]

  def step(self, state: list[PyTree], batch: PyTree) -> tuple[list[PyTree], StackMetrics]:
    return self.jitted_step(state, batch)

  def pack(self, states: Sequence[TrainState]) -> list[PyTree]:
    """Raise UserError if members of one group differ in shared parameters."""
    if not self.request.spread and not self.request.spans_processes:
      states = jax.device_get(list(states))  # they may be on other devices
    by_group = []
    for group, members in zip(self.groups, self.indices, strict=True):
      own = [states[z] for z in members]
      group.check_shared(own)
      by_group.append(own)

    def stack(by_group: list[list[TrainState]]) -> list[PyTree]:
      return [group.stack(own) for group, own in zip(self.groups, by_group, strict=True)]

    jitted = jax.jit(stack, out_shardings=self.shardings)
    return jitted(by_group)

  def take(self, state: list[PyTree], z: int) -> TrainState:
    """The solo state of member z: copies, since the next step donates the state."""
    number = self._places[z].group
    shared = self.groups[number].shared(state[number])
    return self._take_with_shared(state, z, copy_tree(shared))

  def unpack(self, state: list[PyTree]) -> list[TrainState]:
    """The solo states of all members, which have one copy of what their group shares.

    A stack over devices is gathered once for all of them.
    """
    shared = []
    gathered = []
    for group, own, sharding in zip(self.groups, state, self._gathered_shardings, strict=True):
      shared.append(copy_tree(group.shared(own)))
      if sharding is None:
        gathered.append(own)
      else:
        gather = jax.jit(copy_tree, out_shardings=sharding)
        gathered.append(gather(own))
    states = []
    for z, place in enumerate(self._places):
      states.append(self._take_with_shared(gathered, z, shared[place.group]))
    return states

  def _take_with_shared(self, state: list[PyTree], z: int, shared: PyTree) -> TrainState:
    """The solo state of member z, with a copy of what its group shares."""
    number, row = self._places[z]
    take_row_of_group = self._take[number]
    own = take_row_of_group(state[number], row)
    return self.groups[number].with_shared(own, shared)

  def _jit_take(self, group: Group) -> Callable[[PyTree, int], TrainState]:
    """The solo state of a row; one program for all rows where they have one optimizer."""
    static: tuple[int, ...] = ()
    if not group.has_one_optimizer:
      static = (1,)  # the row
    shardings = group.programs[0].shardings
    if shardings is not None:
      own_params, _ = split(shardings.params, group.labels)
      shardings = shardings.replace(params=own_params)
    elif self.request.spans_processes:
      shardings = self._placement.replicated
    return jax.jit(group.take, static_argnums=static, out_shardings=shardings)

  def predict(self, state: list[PyTree], inputs: PyTree, method: str = "predict") -> list[PyTree]:
    by_group = self._predict_groups(state, inputs, method=method)
    return [take_row(by_group[place.group], place.row) for place in self._places]

  def predict_members(
    self,
    state: list[PyTree],
    inputs: PyTree,
    members: Sequence[int],
    *,
    own_inputs: bool,
  ) -> list[PyTree]:
    positions_of: dict[int, list[int]] = {}  # by group, the positions in `members`
    for position, z in enumerate(members):
      positions_of.setdefault(self._places[z].group, []).append(position)
    results: list[PyTree] = [None] * len(members)
    for number, positions in positions_of.items():
      rows = np.array([self._places[members[position]].row for position in positions])
      own = take_row(inputs, np.array(positions)) if own_inputs else inputs
      stacked = self._predict_rows[number](state[number], rows, own, own_inputs=own_inputs)
      for n, position in enumerate(positions):
        results[position] = take_row(stacked, n)
    return results

  def place(self, batch: PyTree, *, own_batches: bool = False) -> PyTree:
    if not self.request.spans_processes:
      return batch
    sharding = self._placement.batch(own_batches)
    global_batch = self._abstract_batch(own_batches)

    def assemble(local: np.ndarray, abstract: jax.ShapeDtypeStruct) -> jax.Array:
      return jax.make_array_from_process_local_data(sharding, local, abstract.shape)

    return jax.tree.map(assemble, batch, global_batch)

  def _abstract_batch(self, own_batches: bool) -> PyTree:
    """Shapes and dtypes of a step's batch, with all its rows."""
    one = self.request.batch
    if not own_batches:
      return one
    num_members = len(self.programs)

    def stacked(leaf: PyTree) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((num_members, *leaf.shape), leaf.dtype)

    return jax.tree.map(stacked, one)

  def step_cost(self) -> StepCost:
    costs = self.member_costs()
    num_devices = self._placement.num_devices
    all_members = total_cost(costs)
    # The members of a group share operations.
    operations = sum(costs[group[0]].operations for group in self.indices)
    state_bytes = sum(tree_bytes(state) for state in self.abstract)
    state_bytes -= sum(group.bytes_saved for group in self.groups)
    total = MemberCost(
      flops=all_members.flops,
      operations=operations * num_devices,
      bytes=all_members.bytes,
    )
    on_device = MemberCost(
      flops=all_members.flops / num_devices,
      operations=operations,
      bytes=all_members.bytes / num_devices,
    )
    return StepCost(
      on_device=on_device,
      total=total,
      num_devices=num_devices,
      num_programs=1,
      operations_compiled=operations,
      state_bytes=state_bytes / num_devices,
    )

  def _step(self, state: list[PyTree], batch: PyTree) -> tuple[list[PyTree], StackMetrics]:
    """A step of all groups, to be jitted."""
    batches = [self._batch_of(group, batch) for group in self.indices]
    steps = [group.step for group in self.groups]
    new_states = []
    metrics = []
    for new_state, own_metrics in self._run_groups(steps, state, batches):
      new_states.append(new_state)
      metrics.append(self._placement.on_all_devices(own_metrics))
    return new_states, self._join(metrics)

  def _join(self, by_group: list[Metrics]) -> StackMetrics:
    """The metrics of all members from the stacked metrics of every group."""
    common = stack_common(by_group, self._order_Z)
    own = []
    for place in self._places:
      others = metrics_besides(common, by_group[place.group])
      own.append(take_row(others, place.row))
    return StackMetrics(common, own)

  def _predict(self, state: list[PyTree], inputs: PyTree, method: str) -> list[PyTree]:
    """The results of all groups, to be jitted."""
    functions = [functools.partial(group.predict, method=method) for group in self.groups]
    inputs_of_groups = [inputs] * len(self.groups)
    results = self._run_groups(functions, state, inputs_of_groups)
    return [self._placement.on_all_devices(result) for result in results]

  def _run_groups(
    self,
    functions: Sequence[Callable[[PyTree, PyTree], PyTree]],
    states: list[PyTree],
    inputs: list[PyTree],
  ) -> list[PyTree]:
    """Per group, functions[g](states[g], inputs[g]).

    Devices that XLA:CPU simulates would start the collectives of independent groups in different
    orders and wait for each other forever: there, each group waits for the results of the one
    before it.
    """
    platform = self.request.devices[0].platform
    in_order = self.request.spread and platform == "cpu"
    results: list[PyTree] = []
    for function, state, own_inputs in zip(functions, states, inputs, strict=True):
      operands = (state, own_inputs)
      if results and in_order:
        operands, _ = jax.lax.optimization_barrier((operands, results[-1]))
      results.append(function(*operands))
    return results

  def _batch_of(self, group: list[int], batch: PyTree) -> PyTree:
    """The part of a step's batch that the group reads."""
    if not self.request.own_batches:
      return batch
    return take_row(batch, np.asarray(group))

  def trace(self) -> None:
    """Trace the step for its first call, which does not trace it again.

    Raises:
      NotImplementedError: the members' modules have an operation that JAX cannot vmap.
    """
    own_batches = self.request.own_batches
    batch = self._abstract_batch(own_batches)
    if self.request.spans_processes:
      batch = with_shardings(batch, self._placement.batch(own_batches))
    # Without the shardings, the types of the arrays would lack the mesh that those of the first
    # call have, and the step would be traced again.
    states = []
    for group, sharding in zip(self.groups, self.shardings, strict=True):
      states.append(with_shardings(group.abstract_state, sharding))
    self.jitted_step.eval_shape(states, batch)
