"""Calls of the loss or the update of a phase, and checks of what they return."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.errors import UserError
from maxlite.optim.labels import paths_in
from maxlite.phases.phase import Phase
from maxlite.sharding.pytree import PyTree, same_structure
from maxlite.step.api_checks import check_scalars, check_unreserved, explain_collections
from maxlite.step.gradients import LossFunction

_STEP_METRICS = ("phase", "grad_norm", "skipped", "skipped_in_a_row", "zero_gradients")
_COLLECTIONS = (
  "give it to init(params, {{{name!r}: ...}}), take the argument collections, and write "
  "model.apply({{'params': params, **collections}}, ..., mutable=[{name!r}])"
)


class Returned(NamedTuple):
  """What a loss or an update returned."""

  value: PyTree  # The scalar of a loss, or the parameters of an update.
  metrics: Mapping[str, jax.Array]
  collections: PyTree


@dataclasses.dataclass(frozen=True)
class PhaseLoss(LossFunction):
  """The mean of a phase's loss over its micro-batches."""

  phase: Phase

  def forward(
    self,
    params: PyTree,
    collections: PyTree,
    batch: PyTree,
    key: jax.Array,
    extra: Mapping[str, PyTree],
  ) -> tuple[tuple[jax.Array, dict], PyTree]:
    returned = _call_loss(self.phase, params, batch, key, collections)
    metrics = {"loss": returned.value, **returned.metrics}
    return (returned.value, jax.lax.stop_gradient(metrics)), returned.collections

  def combine(self, sums: tuple[jax.Array, dict]) -> tuple[jax.Array, dict]:
    return jax.tree.map(lambda x: x / self.phase.accumulate, sums)


def check_divides(phase: Phase, batch: PyTree) -> None:
  """Raise UserError if a batch does not divide into the micro-batches of `phase`."""
  if phase.accumulate == 1:
    return
  for leaf in jax.tree.leaves(batch):
    shape = jnp.shape(leaf)
    if not shape or shape[0] % phase.accumulate:
      raise UserError(
        f"phase {phase.name}: a batch of shape {shape} does not divide into "
        f"accumulate={phase.accumulate} parts along its first axis"
      )


def _call_loss(
  phase: Phase,
  params: PyTree,
  batch: PyTree,
  key: jax.Array,
  collections: PyTree,
) -> Returned:
  """Call the loss of a phase.

  Raises:
    UserError: it returns something other than a scalar, metrics and collections.
  """
  assert phase.loss is not None
  place = f"the loss of phase {phase.name}"
  given = _extra_arguments(phase.loss, key, collections, place)
  try:
    with explain_collections(place, _COLLECTIONS):
      result = phase.loss(params, batch, **given)
  except Exception as error:
    if not isinstance(error, UserError) and _returns_scalar(phase.loss, batch, params, given):
      raise UserError(
        f"{place} takes (batch, params); it is called as loss(params, batch)"
      ) from error
    raise
  parts = (result,)
  if isinstance(result, tuple):
    parts = result
  takes_collections = "collections" in given
  returned = _returned(parts, "scalar", takes_collections, collections, place)
  check_scalars({"loss": returned.value, **returned.metrics}, f"phase {phase.name}")
  check_unreserved(returned.metrics, _STEP_METRICS, f"phase {phase.name}")
  return returned


def call_update(
  phase: Phase, params: PyTree, batch: PyTree, key: jax.Array, collections: PyTree
) -> Returned:
  """Call the update of a phase.

  Raises:
    UserError: it returns something other than parameters, metrics and collections.
  """
  assert phase.update is not None
  place = f"the update of phase {phase.name}"
  given = _extra_arguments(phase.update, key, collections, place)
  with explain_collections(place, _COLLECTIONS):
    result = phase.update(params, batch, **given)
  # Parameters may be a tuple too.
  is_params = same_structure(result, params)
  parts = (result,)
  if isinstance(result, tuple) and not is_params:
    parts = result
  takes_collections = "collections" in given
  returned = _returned(parts, "parameters", takes_collections, collections, place)
  _check_like(returned.value, params, place)
  check_scalars(returned.metrics, f"phase {phase.name}")
  check_unreserved(returned.metrics, _STEP_METRICS, f"phase {phase.name}")
  return returned


def _extra_arguments(
  function: Callable[..., PyTree], key: jax.Array, collections: PyTree, place: str
) -> dict[str, PyTree]:
  """The arguments beside (params, batch) that `function` takes."""
  takes = inspect.signature(function).parameters
  given = {}
  if "key" in takes:
    given["key"] = key
  if "collections" in takes:
    if collections is None:
      raise UserError(
        f"{place} takes collections, and the state has none: give them to init(params, collections)"
      )
    given["collections"] = collections
  return given


def _returns_scalar(
  loss: Callable[..., PyTree], params: PyTree, batch: PyTree, given: Mapping[str, PyTree]
) -> bool:
  """Whether a call of `loss` with these arguments returns a floating scalar."""
  try:
    result = loss(params, batch, **given)
    if isinstance(result, tuple):
      result = result[0]
    check_scalars({"loss": result}, "")
  except Exception:  # of any kind: the loss is not written for these arguments
    return False
  return True


def _returned(
  parts: tuple[PyTree, ...],
  value: str,
  takes_collections: bool,
  collections: PyTree,
  place: str,
) -> Returned:
  """Name the 1 to 3 values that a function returned.

  Args:
    value: the word for the first of them, for messages.
    collections: those that the function was given.
  """
  _check_count(len(parts), value, takes_collections, place)
  metrics: PyTree = {}
  if len(parts) > 1:
    metrics = parts[1]
  if not isinstance(metrics, Mapping):
    raise UserError(
      f"{place} returns a {type(metrics).__name__} as its second value, not a dict of metrics: "
      f"return ({value}, {{name: scalar}})"
    )
  updated = collections
  if len(parts) > 2:
    updated = parts[2]
  changed = set(paths_in(updated)) ^ set(paths_in(collections))
  if changed:
    raise UserError(
      f"{place} must return the collections that it gets; they differ in "
      f"{', '.join(sorted(changed)[:3])}"
    )
  return Returned(parts[0], metrics, updated)


def _check_count(num_values: int, value: str, takes_collections: bool, place: str) -> None:
  """Raise UserError if a function returned too few or too many values."""
  if takes_collections:
    is_valid = num_values == 3
    form = f"{value}, {{name: scalar}}, collections"
  else:
    is_valid = 1 <= num_values <= 3
    form = value
  if not is_valid:
    raise UserError(f"{place} returns {num_values} values, not ({form})")


def _check_like(updated: PyTree, params: PyTree, place: str) -> None:
  """Raise UserError if `updated` is not a tree like the parameters."""
  changed = set(paths_in(updated)) ^ set(paths_in(params))
  if changed or not same_structure(updated, params):
    raise UserError(
      f"{place} must return all parameters, or (parameters, {{name: scalar}}); they differ in "
      f"{', '.join(sorted(changed)[:3]) or 'their structure'}"
    )
  paths = paths_in(params)
  old_leaves = jax.tree.leaves(params)
  new_leaves = jax.tree.leaves(updated)
  for path, old, new in zip(paths, old_leaves, new_leaves, strict=True):
    is_same_type = jnp.result_type(new) == jnp.result_type(old)
    if not is_same_type or jnp.shape(new) != jnp.shape(old):
      found = jax.typeof(new).str_short()
      wanted = jax.typeof(old).str_short()
      raise UserError(f"{place} returns {path} as {found}, not {wanted}")
