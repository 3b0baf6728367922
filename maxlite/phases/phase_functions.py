"""Calls of the loss or the update of a phase, and checks of what they return."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from maxlite.errors import UserError
from maxlite.libraries.as_model import library_of
from maxlite.libraries.calls import Returned, extra_arguments, returned
from maxlite.libraries.model import Model
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


@dataclasses.dataclass(frozen=True)
class PhaseLoss(LossFunction):
  """The mean of a phase's loss over its micro-batches."""

  phase: Phase
  model: Model | None  # which the loss gets; None: it gets the parameters

  def forward(
    self,
    params: PyTree,
    collections: PyTree,
    batch: PyTree,
    key: jax.Array,
    extra: Mapping[str, PyTree],
  ) -> tuple[tuple[jax.Array, dict], PyTree]:
    result = _call_loss(self.phase, self.model, params, batch, key, collections)
    metrics = {"loss": result.value, **result.metrics}
    return (result.value, jax.lax.stop_gradient(metrics)), result.collections

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
  model: Model | None,
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
  try:
    result = _call(phase.loss, model, params, batch, key, collections, place, "scalar")
  except Exception as error:
    if isinstance(error, UserError) or model is not None:
      raise
    arguments = _extra_arguments(phase.loss, key, collections, place)
    if _returns_scalar(phase.loss, batch, params, arguments):
      raise UserError(
        f"{place} takes (batch, params); it is called as loss(params, batch)"
      ) from error
    raise
  check_scalars({"loss": result.value, **result.metrics}, f"phase {phase.name}")
  check_unreserved(result.metrics, _STEP_METRICS, f"phase {phase.name}")
  return result


def call_update(
  phase: Phase,
  model: Model | None,
  params: PyTree,
  batch: PyTree,
  key: jax.Array,
  collections: PyTree,
) -> Returned:
  """Call the update of a phase.

  Raises:
    UserError: it returns something other than parameters, metrics and collections.
  """
  assert phase.update is not None
  place = f"the update of phase {phase.name}"
  word = "parameters" if model is None else "model"
  result = _call(phase.update, model, params, batch, key, collections, place, word)
  if model is not None:
    if not library_of(result.value):
      raise UserError(f"{place} must return the model, or (model, {{name: scalar}})")
    result = result._replace(value=model.params_of(result.value))
  _check_like(result.value, params, place)
  check_scalars(result.metrics, f"phase {phase.name}")
  check_unreserved(result.metrics, _STEP_METRICS, f"phase {phase.name}")
  return result


def _call(
  function: Callable[..., PyTree],
  model: Model | None,
  params: PyTree,
  batch: PyTree,
  key: jax.Array,
  collections: PyTree,
  place: str,
  value: str,
) -> Returned:
  """Call a loss or an update with the model, or, if there is none, with the tree of parameters."""
  if model is not None:
    variables = {"params": params, **collections}
    return model.call(function, variables, batch, key, place, value)
  arguments = _extra_arguments(function, key, collections, place)
  with explain_collections(place, _COLLECTIONS):
    result = function(params, batch, **arguments)
  return returned(
    result,
    place,
    value=value,
    params=params if value == "parameters" else None,
    state_name="collections" if "collections" in arguments else "",
    state=collections,
  )


def _extra_arguments(
  function: Callable[..., PyTree], key: jax.Array, collections: PyTree, place: str
) -> dict[str, PyTree]:
  """The arguments beside (params, batch) that `function` takes."""
  arguments = extra_arguments(function, {"key": key, "collections": collections})
  if "collections" in arguments and collections is None:
    raise UserError(
      f"{place} takes collections, and the state has none: give them to init(params, collections)"
    )
  return arguments


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
