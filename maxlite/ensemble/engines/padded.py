"""Members of different sizes as one stack of the largest member's shapes.

Every array of a smaller member is padded with zeros, and the module of the largest member computes
all of them. Not every module gives the same function then: means over units, for example, change.
So the first step compares every member's loss, gradients and update with those of its solo run.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  StackMetrics,
  StepCost,
  require_one_process,
)
from maxlite.ensemble.engines.group_trees import take_row
from maxlite.ensemble.engines.member_group import MemberGroup
from maxlite.ensemble.engines.stacked import StackedEngine
from maxlite.ensemble.members.program import MemberProgram
from maxlite.errors import UserError
from maxlite.kernels.xla_cpu import jit_init
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientResult
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import step_key

TOLERANCE = 1e-4  # the largest error, relative to the largest value of an array
# The largest error in units of rounding (the type's eps) of the largest gradient of a member. The
# terms of a gradient that is zero, such as that of a bias before BatchNorm, have the size of other
# gradients, since all are products of the same derivatives with activations; their rounded sum
# depends on the order. A change of this size is below what float32 resolves in the largest one.
ROUNDINGS = 8


class PaddedEngine(EnsembleEngine):
  """The state is that of a stack of members with the largest member's shapes."""

  def __init__(self, request: EngineRequest):
    """Raise UserError if the members' arrays are not parts of those of one of them."""
    require_one_process(request)
    super().__init__(request, request.build())
    if any(program.functions.schedule is not None for program in self.programs):
      raise UserError("padding takes members without phases; use fused")
    largest = self.programs[_find_largest(self.programs, self.abstract)]
    stand_ins = []
    for program in self.programs:
      stand_in = dataclasses.replace(
        largest,
        name=program.name,
        seed=program.seed,
        numbers=program.numbers,
        base=None,
      )
      stand_ins.append(stand_in)
    one_group = list(range(len(stand_ins)))
    self._stack = StackedEngine(request, stand_ins, [one_group])
    self._is_compared = len(self.programs) == 1  # one member is not padded

  def step_cost(self) -> StepCost:
    return self._stack.step_cost()

  def init(self) -> list[PyTree]:
    states = []
    for program in self.programs:
      init = jit_init(program.functions.init)
      states.append(init(program.seed_array, program.read_base_params()))
    return self.pack(states)

  def pack(self, states: Sequence[TrainState]) -> list[PyTree]:
    padded = []
    for state, largest in zip(states, self._stack.abstract, strict=True):
      padded.append(jax.tree.map(_pad, state, largest))
    return self._stack.pack(padded)

  def take(self, state: list[PyTree], z: int) -> TrainState:
    return jax.tree.map(_cut, self._stack.take(state, z), self.abstract[z])

  def predict(self, state: list[PyTree], inputs: PyTree, method: str = "predict") -> list[PyTree]:
    padded = self._stack.predict(state, inputs, method)
    shapes = self.result_shapes(method, inputs)
    results = []
    for result, shape in zip(padded, shapes, strict=True):
      results.append(jax.tree.map(_cut, result, shape))
    return results

  def step(self, state: list[PyTree], batch: PyTree) -> tuple[list[PyTree], StackMetrics]:
    """Raise UserError in the first step if padding changes what a member computes."""
    if self._is_compared:
      return self._stack.step(state, batch)
    before = [self.take(state, z) for z in range(len(self.programs))]
    (group,) = self._stack.groups
    assert isinstance(group, MemberGroup)
    result_Z = jax.jit(group.gradients)(state[0], batch)
    state, metrics = self._stack.step(state, batch)
    for z, program in enumerate(self.programs):
      own_batch = take_row(batch, z) if self.request.own_batches else batch
      result = take_row(result_Z, z)
      solo_result = _solo_gradients(program, before[z], own_batch)
      _require_equal("loss", program.name, metrics.common["loss"][z], solo_result.loss)
      _require_equal("gradient", program.name, result.gradients, solo_result.gradients, ROUNDINGS)
      # From equal gradients: the update of one that is zero but for rounding may be large.
      padded_before = jax.tree.map(_pad, before[z], self._stack.abstract[z])
      padded_result = jax.tree.map(_pad, solo_result, result)
      padded_change = _update(program, padded_before, padded_result)
      change = _update(program, before[z], solo_result)
      _require_equal("update", program.name, padded_change, change)
    self._is_compared = True
    return state, metrics


def _find_largest(programs: Sequence[MemberProgram], states: Sequence[TrainState]) -> int:
  """The member whose arrays are at least as large as those of all others along every axis."""
  structures = {jax.tree.structure(state) for state in states}
  if len(structures) > 1 or len({program.update_key for program in programs}) > 1:
    raise UserError("padding takes members with the same parameters and optimizer function")
  sizes_of_axes = []  # by member, the sizes of all axes of its arrays
  for state in states:
    sizes: list[int] = []
    for leaf in jax.tree.leaves(state):
      sizes.extend(leaf.shape)
    sizes_of_axes.append(sizes)
  sizes_ZA = np.array(sizes_of_axes)
  is_largest = (sizes_ZA == sizes_ZA.max(axis=0)).all(axis=1)
  if not is_largest.any():
    raise UserError("no member is the largest along every axis, to whose shapes to pad the others")
  return int(np.argmax(is_largest))


def _pad(leaf: jax.Array, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
  """An array with zeros at the end of its axes, up to the shape of `like`."""
  if leaf.shape == like.shape:
    return leaf
  widths = [(0, large - small) for small, large in zip(leaf.shape, like.shape, strict=True)]
  return jnp.pad(leaf, widths)


def _cut(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  """The part of a padded array that has the shape of `like`."""
  own_part = tuple(slice(size) for size in like.shape)
  return leaf[own_part]


def _solo_gradients(program: MemberProgram, state: TrainState, batch: PyTree) -> GradientResult:
  """The result of the forward and backward pass of the member's solo run."""
  (parts,) = program.functions.phases
  gradients = jax.jit(parts.gradients)
  return gradients(state.params, state.collections, batch, step_key(state))


def _update(program: MemberProgram, state: TrainState, result: GradientResult) -> PyTree:
  """The change of the parameters in a step of the member's solo run, also on padded arrays."""
  (parts,) = program.functions.phases

  @jax.jit
  def change(state: TrainState, result: GradientResult) -> PyTree:
    new_state, _ = parts.update(state, result)
    return jax.tree.map(jnp.subtract, new_state.params, state.params)

  return change(state, result)


def _require_equal(
  what: str, name: str, padded: PyTree, solo: PyTree, roundings: float = 0
) -> None:
  """Raise UserError if arrays of a padded member are not the padded arrays of its solo run.

  Args:
    roundings: the error that every array may have, in units of rounding of the largest of all.
  """
  expected = jax.tree.leaves(jax.tree.map(_pad, solo, padded))
  largest_of_all = max((np.max(np.abs(want), initial=0) for want in expected), default=0)
  for got, want in zip(jax.tree.leaves(padded), expected, strict=True):
    error = np.max(np.abs(got - want), initial=0)
    tolerance = TOLERANCE * np.max(np.abs(want), initial=0)
    if roundings and jnp.issubdtype(want.dtype, jnp.floating):
      tolerance += roundings * jnp.finfo(want.dtype).eps * largest_of_all
    if not error <= tolerance:
      raise UserError(
        f"padding changes the {what} of {name} by {error:.2g}, so its results would not "
        "be those of its solo run: use fused"
      )
