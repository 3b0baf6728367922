"""Members with equal modules as one module, lifted by `nn.vmap`.

`MemberModule` holds the variables of one member and computes the gradients of its loss. `nn.vmap`
gives every variable a first axis of Z members, the logical axis `ensemble`. The update of the step
runs under `jax.vmap` on the members' states, in which numbers that differ between members (learning
rates, decays) are arrays. So the step of a group is the step of a solo run with one more axis.

Frozen parameters that are equal in all members have no such axis: the members share one copy.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding

from maxlite.ensemble.engines.engine_base import Metrics, tree_bytes
from maxlite.ensemble.engines.group import Group
from maxlite.ensemble.engines.group_trees import (
  stack_rows,
  stacked_sharding,
  take_row,
)
from maxlite.ensemble.members.program import MemberFunctions, MemberProgram, Seed, variables_of
from maxlite.errors import UserError
from maxlite.kernels.vmapped_convolution import keep_members_apart
from maxlite.optim.labels import Labels, merge, path_of, split
from maxlite.optim.stored_numbers import set_numbers, with_numbers, without_numbers
from maxlite.phases.phase_opt_states import PhaseOptStates
from maxlite.phases.phase_programs import switch_step
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientResult
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import step_key

# (state of a member, result of its backward pass) -> (state, metrics)
Update = Callable[[TrainState, GradientResult], tuple[TrainState, Metrics]]

# The variable that has the whole tree of a collection, which need not be a dict.
_TREE = "tree"


class GroupState(struct.PyTreeNode):
  """The states of Z members; in `members`, every leaf has a first axis of Z."""

  # The members' states, with `optax.MaskedNode()` in place of the parameters in `shared`. If the
  # members' optimizers are different functions, the optimizer state is a tuple of one per member.
  members: TrainState
  # Frozen parameters that are equal in all members: the other part of `split`.
  shared: PyTree

  @property
  def clock(self) -> PyTree:
    """The position in the schedule of phases, which all members have."""
    return take_row(self.members.clock, 0)


class MemberModule(nn.Module):
  """The variables of one member, and the gradients of its loss."""

  # As in `MemberFunctions`, without the shared parameters.
  init_variables: Callable[[Seed, PyTree], dict[str, PyTree]]
  # (own parameters, shared ones, other collections, batch, random key) -> GradientResult
  gradients: Callable[..., GradientResult]
  has_collections: bool  # whether the module has others than `params`

  def create(self, seed: jax.Array, params: PyTree) -> None:
    """Create the variables; every one has logical names, so that the members' axis has one too."""
    for collection, tree in self.init_variables(seed, params).items():
      named = jax.tree.map(_with_names, tree, is_leaf=_has_names)
      self.put_variable(collection, _TREE, named)

  def __call__(self, shared: PyTree, batch: PyTree, key: jax.Array) -> GradientResult:
    """The gradients of the loss, for the variables of this module and the shared parameters."""
    variables = {name: named_tree[_TREE] for name, named_tree in self.variables.items()}
    own = variables.pop("params")
    collections = variables if self.has_collections else None
    return self.gradients(own, shared, collections, batch, key)


def _has_names(leaf: PyTree) -> bool:
  return isinstance(leaf, meta.AxisMetadata)


def _with_names(leaf: PyTree) -> PyTree:
  """The variable with a logical name, which may be None, for every axis."""
  if _has_names(leaf):
    return leaf
  return nn.LogicallyPartitioned(leaf, (None,) * jnp.ndim(leaf))


class MemberGroup(Group):
  """The pure functions of several members with equal modules."""

  def __init__(self, programs: Sequence[MemberProgram], *, own_batches: bool):
    """
    Args:
      own_batches: whether a step takes a batch per member, stacked.
    """
    keep_members_apart()
    first = programs[0]
    # One optimizer under vmap; otherwise one per member, on its part of the stacked arrays.
    has_one_optimizer = len({program.update_key for program in programs}) == 1
    stored = first.solo_numbers
    if has_one_optimizer:
      stored |= _names_of_differing_numbers(programs)
    functions = first.build(stored)
    super().__init__(
      programs,
      functions,
      labels=_labels_of(programs, functions),
      has_one_optimizer=has_one_optimizer,
      own_batches=own_batches,
    )
    self._stored = stored  # names of the numbers in the optimizer state
    self._seed_Z = np.stack([program.seed_array for program in programs])
    # Whether one function draws the variables of all members; others start from stacked variables.
    draws_alike = len({program.draw_key for program in programs}) == 1
    self._draws = draws_alike and not first.has_own_start

  @property
  def axis(self) -> str | None:
    sharder = self.functions.sharder
    if sharder is None or sharder.num_shards("ensemble") == 1:
      return None
    return sharder.mesh_axes("ensemble")[0]

  @functools.cached_property
  def abstract_state(self) -> GroupState:
    return jax.eval_shape(self.init)

  @property
  def bytes_saved(self) -> float:
    _, shared = split(self.functions.abstract_state.params, self.labels)
    return tree_bytes(shared) * (len(self.programs) - 1)

  def read_start(self) -> PyTree:
    if self._draws:
      return self.programs[0].read_base_params()
    variables = []
    for program in self.programs:
      # Outside of a program: one with every member's functions would take long to compile.
      start = program.read_base_params()
      variables.append(jax.device_get(program.functions.init_variables(program.seed_array, start)))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *variables)

  def init(self, start: PyTree = None) -> GroupState:
    variables_Z, shared = self._init_variables(start)

    def begin(
      functions: MemberFunctions,
      variables: dict[str, PyTree],
      seed: Seed,
    ) -> TrainState:
      whole = dict(variables)
      whole["params"] = merge(variables["params"], shared)
      return self._without_shared(functions.start(whole, seed))

    start_all = jax.vmap(functools.partial(begin, self.functions))
    members = start_all(variables_Z, self._seed_Z)
    if self.has_one_optimizer:
      opt_state = self._by_phase(self._set_numbers, members.opt_state)
    else:
      opt_states = []
      for z, program in enumerate(self.programs):
        own = begin(program.functions, take_row(variables_Z, z), self._seed_Z[z])
        opt_states.append(own.opt_state)
      opt_state = tuple(opt_states)
    return GroupState(dataclasses.replace(members, opt_state=opt_state), shared)

  def _init_variables(self, start: PyTree) -> tuple[dict[str, PyTree], PyTree]:
    """(the members' variables, stacked, without the shared parameters; the shared ones)."""
    if self._draws or start is None:  # None, where only shapes are computed
      drawn = self.functions.init_variables(self._seed_Z[0], start)
      _, shared = split(meta.unbox(drawn["params"]), self.labels)
      module = self._lift("create", in_axes=(0, None))
      _, boxed = module.apply({}, self._seed_Z, start, method="create", mutable=True)
      variables_Z = {name: named_tree[_TREE] for name, named_tree in meta.unbox(boxed).items()}
      return variables_Z, shared
    variables_Z = dict(start)
    variables_Z["params"], frozen_Z = split(start["params"], self.labels)
    return variables_Z, take_row(frozen_Z, 0)

  def step(self, state: GroupState, batch: PyTree) -> tuple[GroupState, Metrics]:
    """(state, {metric: [Z, ...]}) after a step of the phase that is due."""
    schedule = self.functions.schedule
    if schedule is None:
      return self._phase_step(0, state, batch)
    steps = {}
    for index, name in enumerate(schedule.names):
      steps[name] = functools.partial(self._phase_step, index)
    switched = switch_step(steps, schedule, state, batch)
    return switched(state, batch)

  def gradients(self, state: GroupState, batch: PyTree, index: int = 0) -> GradientResult:
    """The result of the members' forward and backward passes, stacked, in the phase `index`."""
    batch_axis = 0 if self._own_batches else None
    of_one = self.functions.phases[index].gradients
    module = self._lift("__call__", in_axes=(None, batch_axis, 0), gradients_of=of_one)
    key_Z = jax.vmap(step_key)(dataclasses.replace(state.members, opt_state=None))
    variables = {name: {_TREE: tree} for name, tree in variables_of(state.members).items()}
    result = module.apply(variables, state.shared, batch, key_Z)
    return cast(GradientResult, result)

  def predict(self, state: GroupState, inputs: PyTree, method: str = "predict") -> PyTree:
    function = getattr(self.functions, method)

    def predict_one(member: TrainState) -> PyTree:
      return function(self.with_shared(member, state.shared), inputs)

    members = dataclasses.replace(state.members, opt_state=None)
    return jax.vmap(predict_one, spmd_axis_name=self.axis)(members)

  def predict_rows(
    self, state: GroupState, rows: jax.Array, inputs: PyTree, *, own_inputs: bool
  ) -> PyTree:
    def predict_one(member: TrainState, inputs: PyTree) -> PyTree:
      return self.functions.predict(self.with_shared(member, state.shared), inputs)

    members = take_row(dataclasses.replace(state.members, opt_state=None), rows)
    return jax.vmap(predict_one, in_axes=(0, 0 if own_inputs else None))(members, inputs)

  def stack(self, states: Sequence[TrainState]) -> GroupState:
    _, shared = split(states[0].params, self.labels)
    own = [self._without_shared(state) for state in states]
    if self.has_one_optimizer:
      stored = []
      for z, state in enumerate(own):
        opt_state = self._with_numbers(state.opt_state, z)
        stored.append(dataclasses.replace(state, opt_state=opt_state))
      return GroupState(stack_rows(stored), shared)
    members = stack_rows([dataclasses.replace(state, opt_state=None) for state in own])
    opt_states = tuple(state.opt_state for state in own)
    return GroupState(dataclasses.replace(members, opt_state=opt_states), shared)

  def check_shared(self, states: Sequence[TrainState]) -> None:
    _, first = split(states[0].params, self.labels)
    for program, state in zip(self.programs, states, strict=True):
      _, shared = split(state.params, self.labels)
      others = jax.tree.leaves(shared)
      for (path, leaf), other in zip(jax.tree.leaves_with_path(first), others, strict=True):
        if leaf is not other and not _are_equal(leaf, other):
          raise UserError(
            f"{path_of(path)} is frozen and shared, but differs between {self.programs[0].name} "
            f"and {program.name}: train them as separate runs, or from one load_parameters_path"
          )

  def shared(self, state: GroupState) -> PyTree:
    return state.shared

  def take(self, state: GroupState, row: int | jax.Array) -> TrainState:
    if self.has_one_optimizer:
      member = take_row(state.members, row)
      opt_state = self._by_phase(self._without_numbers, member.opt_state)
    else:
      member = take_row(dataclasses.replace(state.members, opt_state=None), row)
      opt_state = state.members.opt_state[row]
    return dataclasses.replace(member, opt_state=opt_state)

  def with_shared(self, member: TrainState, shared: PyTree) -> TrainState:
    whole_params = merge(member.params, shared)
    return dataclasses.replace(member, params=whole_params)

  def shardings(self) -> GroupState | None:
    """As in a solo run, after the axis of the members."""
    solo = self.functions.shardings
    if solo is None:
      return None

    own = self._without_shared(solo)
    members = jax.tree.map(lambda sharding: stacked_sharding(sharding, self.axis), own)
    if not self.has_one_optimizer:
      opt_states = tuple(program.functions.shardings.opt_state for program in self.programs)
      members = dataclasses.replace(members, opt_state=opt_states)
    _, shared = split(solo.params, self.labels)
    return GroupState(members, shared)

  def shardings_over(self, mesh: Mesh) -> GroupState:
    stacked = NamedSharding(mesh, jax.P("ensemble"))
    replicated = NamedSharding(mesh, jax.P())
    members = jax.tree.map(lambda _: stacked, self.abstract_state.members)
    if not self.has_one_optimizer:
      opt_states = jax.tree.map(lambda _: replicated, self.abstract_state.members.opt_state)
      members = members.replace(opt_state=opt_states)
    shared = jax.tree.map(lambda _: replicated, self.abstract_state.shared)
    return GroupState(members, shared)

  def _lift(
    self,
    method: str,
    in_axes: tuple[int | None, ...],
    gradients_of: Callable[..., GradientResult] | None = None,
  ) -> nn.Module:
    """The module of all members: every variable has a first axis of Z.

    Args:
      method: the method that is lifted.
      in_axes: for each of its arguments, the axis of the members; None: they share it.
      gradients_of: the gradients of a phase, as in `StepParts`; not needed by `create`.
    """

    def init_variables(seed: Seed, params: PyTree) -> dict[str, PyTree]:
      variables = self.functions.init_variables(seed, params)
      variables["params"], _ = split(variables["params"], self.labels)
      return variables

    def gradients(own: PyTree, shared: PyTree, *inputs: PyTree) -> GradientResult:
      assert gradients_of is not None
      return gradients_of(merge(own, shared), *inputs)

    lifted = nn.vmap(
      MemberModule,
      variable_axes={True: 0},
      split_rngs={True: False},  # every member has its seed and its key as arguments
      in_axes=in_axes,
      axis_size=len(self.programs),
      spmd_axis_name=self.axis,
      metadata_params={nn.PARTITION_NAME: "ensemble"},
      methods=[method],
    )
    return lifted(
      init_variables=init_variables,
      gradients=gradients,
      has_collections=self.functions.abstract_state.collections is not None,
    )

  def _phase_step(
    self,
    index: int,
    state: GroupState,
    batch: PyTree,
  ) -> tuple[GroupState, Metrics]:
    """A step of the phase with this index."""
    result = self.gradients(state, batch, index)
    if self.has_one_optimizer:
      update = self._update_of(self.functions, index, state.shared)
      update_all = jax.vmap(update, spmd_axis_name=self.axis)
      members, metrics = update_all(state.members, result)
    else:
      members, metrics = self._update_one_by_one(index, state, result)
    return dataclasses.replace(state, members=members), metrics

  def _update_of(self, functions: MemberFunctions, index: int, shared: PyTree) -> Update:
    """The update of one member, whose state lacks the shared parameters."""

    def update(state: TrainState, result: GradientResult) -> tuple[TrainState, Metrics]:
      whole = self.with_shared(state, shared)
      new_state, metrics = functions.phases[index].update(whole, result)
      return self._without_shared(new_state), metrics

    return update

  def _update_one_by_one(
    self,
    index: int,
    state: GroupState,
    result: GradientResult,
  ) -> tuple[TrainState, Metrics]:
    """The updates of members whose optimizers are different functions."""
    opt_states = state.members.opt_state
    without_optimizer = dataclasses.replace(state.members, opt_state=None)
    new_states = []
    metrics = []
    for z, program in enumerate(self.programs):
      update = self._update_of(program.functions, index, state.shared)
      own = take_row(without_optimizer, z).replace(opt_state=opt_states[z])
      new_state, own_metrics = update(own, take_row(result, z))
      new_states.append(new_state)
      metrics.append(own_metrics)
    members = stack_rows([dataclasses.replace(state, opt_state=None) for state in new_states])
    opt_states = tuple(state.opt_state for state in new_states)
    return dataclasses.replace(members, opt_state=opt_states), stack_rows(metrics)

  def _without_shared(self, state: TrainState) -> TrainState:
    own_params, _ = split(state.params, self.labels)
    return dataclasses.replace(state, params=own_params)

  def _by_phase(self, function: Callable[[int, PyTree], PyTree], opt_state: PyTree) -> PyTree:
    """function(index of a phase, its optimizer state) for every phase."""
    schedule = self.functions.schedule
    if schedule is None:
      return function(0, opt_state)
    names = list(schedule.names)
    own = {}
    for name, state in opt_state.own.items():
      own[name] = function(names.index(name), state)
    return PhaseOptStates(own)

  def _numbers(self, index: int) -> dict[str, np.ndarray]:
    """The members' values [Z] of the stored numbers of a phase."""
    numbers = {}
    for name in sorted(self._stored):
      values = [program.numbers[index][name] for program in self.programs]
      numbers[name] = np.array(values, np.float32)
    return numbers

  def _set_numbers(self, index: int, opt_state: PyTree) -> PyTree:
    """The stacked optimizer state of a phase with each member's numbers."""
    return set_numbers(opt_state, self._numbers(index))

  def _without_numbers(self, _index: int, opt_state: PyTree) -> PyTree:
    """The optimizer state of a member without the numbers that a solo run does not store."""
    return without_numbers(opt_state, self.programs[0].solo_numbers)

  def _with_numbers(self, opt_state: PyTree, z: int) -> PyTree:
    """The optimizer state of a solo run of member z, with the stored numbers."""
    kept = self.programs[0].solo_numbers
    if self._stored == kept:
      return opt_state
    abstract = self.functions.abstract_state.opt_state

    def convert(index: int, own: PyTree) -> PyTree:
      values = {name: value[z] for name, value in self._numbers(index).items()}
      like = abstract
      if self.functions.schedule is not None:
        like = abstract.own[self.functions.schedule.names[index]]
      return with_numbers(own, like, values, kept)

    return self._by_phase(convert, opt_state)


def _names_of_differing_numbers(programs: Sequence[MemberProgram]) -> frozenset[str]:
  """Names of the numbers of which, in some phase, two members have different values."""
  first = programs[0].numbers
  names = set()
  for index, numbers in enumerate(first):
    for name, value in numbers.items():
      if any(program.numbers[index][name] != value for program in programs):
        names.add(name)
  return frozenset(names)


def _labels_of(programs: Sequence[MemberProgram], functions: MemberFunctions) -> Labels:
  """Labels as frozen the parameters that are equal in all members."""
  bases = {program.base for program in programs}
  if len(bases) > 1 or None in bases:
    return None
  return functions.labels


def _are_equal(left: PyTree, right: PyTree) -> bool:
  """Whether two arrays, which may be on several hosts, are equal."""
  if isinstance(left, jax.Array) and not left.is_fully_addressable:
    return bool(jax.jit(jnp.array_equal)(left, right))
  return np.array_equal(left, right, equal_nan=True)
