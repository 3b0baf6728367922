"""Members of different sizes as one stack of the largest member's shapes.

Every array of a smaller member is padded with zeros, and the module of the largest member computes
all of them. Not every module gives the same function then: means over units, for example, change.
So the first step compares every member's loss, gradients and update with those of its solo run.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  StackMetrics,
  StepCost,
  require_one_process,
)
from maxlite.ensemble.engines.stacked import StackedEngine
from maxlite.ensemble.member_program import MemberProgram
from maxlite.kernels.xla_cpu import jit_init
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import step_key

TOLERANCE = 1e-4  # relative to the largest value of an array


class PaddedEngine(EnsembleEngine):
  """The state is that of a stack of members with the largest member's shapes."""

  def __init__(self, request: EngineRequest):
    """Raise UserError if the members' arrays are not parts of those of one of them."""
    require_one_process(request)
    super().__init__(request, request.build())
    if any(program.functions.schedule is not None for program in self.programs):
      raise UserError("padding takes members without phases; use fused")
    largest = self.programs[_find_largest(self.programs, self.abstract)]
    stand_ins = [
      dataclasses.replace(largest, name=each.name, seed=each.seed, numbers=each.numbers, base=None)
      for each in self.programs
    ]
    self._stack = StackedEngine(request, stand_ins, [list(range(len(stand_ins)))])
    self._is_compared = False

  def step_cost(self) -> StepCost:
    return self._stack.step_cost()

  def init(self) -> list[Any]:
    states = []
    for program in self.programs:
      params = None if program.base_params is None else program.base_params()
      states.append(jit_init(program.functions.init)(program.seed_array, params))
    return self.pack(states)

  def pack(self, states: Sequence[TrainState]) -> list[Any]:
    (largest,) = {id(each): each for each in self._stack.abstract}.values()
    return self._stack.pack([jax.tree.map(_pad, state, largest) for state in states])

  def take(self, state: list[Any], z: int) -> TrainState:
    return jax.tree.map(_cut, self._stack.take(state, z), self.abstract[z])

  def predict(self, state: list[Any], inputs: Any, method: str = "predict") -> list[Any]:
    results = self._stack.predict(state, inputs, method)
    return [
      jax.tree.map(_cut, result, shape)
      for result, shape in zip(results, self.result_shapes(method, inputs), strict=True)
    ]

  def step(self, state: list[Any], batch: Any) -> tuple[list[Any], StackMetrics]:
    """Raise UserError in the first step if padding changes what a member computes."""
    if self._is_compared:
      return self._stack.step(state, batch)
    before = [self.take(state, z) for z in range(len(self.programs))]
    (group,) = self._stack.groups
    gradients = jax.jit(group.gradients)(state[0], batch).gradients
    state, metrics = self._stack.step(state, batch)
    for z, program in enumerate(self.programs):
      own_batch = batch
      if self.request.own_batches:
        own_batch = jax.tree.map(lambda leaf, z=z: leaf[z], batch)
      after = self._stack.take(state, z)
      own_gradients = jax.tree.map(lambda leaf, z=z: leaf[z], gradients)
      _compare(
        program, before[z], own_batch, own_gradients, after.params, metrics.common["loss"][z]
      )
    self._is_compared = True
    return state, metrics


def _find_largest(programs: Sequence[MemberProgram], states: Sequence[TrainState]) -> int:
  """The member whose arrays are at least as large as those of all others along every axis."""
  structures = {jax.tree.structure(state) for state in states}
  if len(structures) > 1 or len({program.update_key for program in programs}) > 1:
    raise UserError("padding takes members with the same parameters and optimizer function")
  shapes = np.array([[n for leaf in jax.tree.leaves(s) for n in leaf.shape] for s in states])
  is_largest = (shapes == shapes.max(axis=0)).all(axis=1)
  if not is_largest.any():
    raise UserError("no member is the largest along every axis, to whose shapes to pad the others")
  return int(np.argmax(is_largest))


def _pad(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  widths = [(0, large - small) for small, large in zip(leaf.shape, like.shape, strict=True)]
  return jnp.pad(leaf, widths) if any(width for _, width in widths) else leaf


def _cut(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
  return leaf[tuple(slice(size) for size in like.shape)]


def _compare(
  program: MemberProgram, before: TrainState, batch: Any, gradients: Any, after: Any, loss: Any
) -> None:
  """Raise UserError if a padded member differs from its solo run in the first step."""
  (parts,) = program.functions.phases

  def solo(state: TrainState) -> tuple[Any, Any, Any]:
    result = parts.gradients(state.params, state.collections, batch, step_key(state))
    new_state, _ = parts.update(state, result)
    change = jax.tree.map(jnp.subtract, new_state.params, state.params)
    return result.loss, result.gradients, change

  solo_loss, solo_gradients, solo_change = jax.jit(solo)(before)
  padded_before = jax.tree.map(_pad, before.params, jax.eval_shape(lambda: after))
  change = jax.tree.map(jnp.subtract, after, padded_before)
  pairs = {"loss": (loss, solo_loss), "gradient": (gradients, solo_gradients)}
  pairs["update"] = (change, solo_change)
  for what, (padded, expected) in pairs.items():
    padded_expected = jax.tree.map(_pad, expected, jax.eval_shape(lambda tree=padded: tree))
    for got, want in zip(jax.tree.leaves(padded), jax.tree.leaves(padded_expected), strict=True):
      error = np.max(np.abs(got - want), initial=0)
      if not error <= TOLERANCE * np.max(np.abs(want), initial=0):
        raise UserError(
          f"padding changes the {what} of {program.name} by {error:.2g}, so its results would not "
          "be those of its solo run: use fused"
        )
