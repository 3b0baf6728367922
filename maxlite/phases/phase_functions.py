"""Calls of the loss or the update of a phase, and checks of what they return."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.optim.labels import paths_in
from maxlite.phases.phase import Phase
from maxlite.step.api_checks import check_scalars, check_unreserved
from maxlite.step.gradients import LossFunction

_STEP_METRICS = ("phase", "grad_norm", "skipped", "skipped_in_a_row", "zero_gradients")


class Returned(NamedTuple):
  """What a loss or an update returned."""

  value: Any  # a scalar, or parameters
  metrics: Mapping[str, Any]
  collections: Any


@dataclasses.dataclass(frozen=True)
class PhaseLoss(LossFunction):
  """The mean of a phase's loss over its micro-batches."""

  phase: Phase

  def forward(
    self,
    params: Any,
    collections: Any,
    batch: Any,
    key: jax.Array,
    extra: Mapping[str, Any],
  ) -> tuple[tuple[jax.Array, dict], Any]:
    loss, metrics, collections = _call_loss(self.phase, params, batch, key, collections)
    return (loss, jax.lax.stop_gradient({"loss": loss, **metrics})), collections

  def combine(self, sums: tuple[jax.Array, dict]) -> tuple[jax.Array, dict]:
    return jax.tree.map(lambda x: x / self.phase.accumulate, sums)


def check_divides(phase: Phase, batch: Any) -> None:
  """Raise UserError if a batch does not divide into the micro-batches of `phase`."""
  if phase.accumulate == 1:
    return
  for x in jax.tree.leaves(batch):
    if not jnp.ndim(x) or jnp.shape(x)[0] % phase.accumulate:
      raise UserError(
        f"phase {phase.name}: a batch of shape {jnp.shape(x)} does not divide into "
        f"accumulate={phase.accumulate} parts along its first axis"
      )


def _call_loss(phase: Phase, params: Any, batch: Any, key: jax.Array, collections: Any) -> Returned:
  assert phase.loss is not None
  place = f"the loss of phase {phase.name}"
  given = _extra_arguments(phase.loss, key, collections, place)
  try:
    result = phase.loss(params, batch, **given)
  except Exception as error:
    if not isinstance(error, UserError) and _returns_scalar(phase.loss, batch, params, given):
      raise UserError(
        f"{place} takes (batch, params); it is called as loss(params, batch)"
      ) from error
    raise
  parts = result if isinstance(result, tuple) else (result,)
  returned = _returned(parts, "scalar", "collections" in given, collections, place)
  check_scalars({"loss": returned.value, **returned.metrics}, f"phase {phase.name}")
  check_unreserved(returned.metrics, _STEP_METRICS, f"phase {phase.name}")
  return returned


def call_update(
  phase: Phase, params: Any, batch: Any, key: jax.Array, collections: Any
) -> Returned:
  """Call the update of a phase.

  Raises:
    UserError: it returns something other than parameters, metrics and collections.
  """
  assert phase.update is not None
  place = f"the update of phase {phase.name}"
  given = _extra_arguments(phase.update, key, collections, place)
  result = phase.update(params, batch, **given)
  is_params = jax.tree.structure(result) == jax.tree.structure(params)
  parts = result if isinstance(result, tuple) and not is_params else (result,)
  returned = _returned(parts, "parameters", "collections" in given, collections, place)
  _check_like(returned.value, params, place)
  check_scalars(returned.metrics, f"phase {phase.name}")
  check_unreserved(returned.metrics, _STEP_METRICS, f"phase {phase.name}")
  return returned


def _extra_arguments(
  function: Callable[..., Any], key: jax.Array, collections: Any, place: str
) -> dict[str, Any]:
  """The arguments beside (params, batch) that `function` takes."""
  takes = inspect.signature(function).parameters
  if "collections" in takes and collections is None:
    raise UserError(
      f"{place} takes collections, and the state has none: give them to init(params, collections)"
    )
  given = {"key": key, "collections": collections}
  return {name: value for name, value in given.items() if name in takes}


def _returns_scalar(
  loss: Callable[..., Any], params: Any, batch: Any, given: Mapping[str, Any]
) -> bool:
  """Whether a call of `loss` with these arguments returns a floating scalar."""
  try:
    result = loss(params, batch, **given)
    value = result[0] if isinstance(result, tuple) else result
    check_scalars({"loss": value}, "")
  except Exception:  # of any kind: the loss is not written for these arguments
    return False
  return True


def _returned(
  parts: tuple, value: str, takes_collections: bool, collections: Any, place: str
) -> Returned:
  """Name the 1 to 3 values that a function returned."""
  form = f"{value}, {{name: scalar}}, collections" if takes_collections else value
  if len(parts) > 3 or not parts or (takes_collections and len(parts) != 3):
    raise UserError(f"{place} returns {len(parts)} values, not ({form})")
  metrics = parts[1] if len(parts) > 1 else {}
  if not isinstance(metrics, Mapping):
    raise UserError(
      f"{place} returns a {type(metrics).__name__} as its second value, not a dict of metrics: "
      f"return ({value}, {{name: scalar}})"
    )
  updated = parts[2] if len(parts) > 2 else collections
  changed = set(paths_in(updated)) ^ set(paths_in(collections))
  if changed:
    raise UserError(
      f"{place} must return the collections that it gets; they differ in "
      f"{', '.join(sorted(changed)[:3])}"
    )
  return Returned(parts[0], metrics, updated)


def _check_like(updated: Any, params: Any, place: str) -> None:
  """Raise UserError if `updated` is not a tree like the parameters."""
  changed = set(paths_in(updated)) ^ set(paths_in(params))
  if changed or jax.tree.structure(updated) != jax.tree.structure(params):
    raise UserError(
      f"{place} must return all parameters, or (parameters, {{name: scalar}}); they differ in "
      f"{', '.join(sorted(changed)[:3]) or 'their structure'}"
    )
  old_leaves = jax.tree.leaves(params)
  new_leaves = jax.tree.leaves(updated)
  for path, old, new in zip(paths_in(params), old_leaves, new_leaves, strict=True):
    if jnp.shape(new) != jnp.shape(old) or jnp.result_type(new) != jnp.result_type(old):
      raise UserError(
        f"{place} returns {path} as {jax.typeof(new).str_short()}, not "
        f"{jax.typeof(old).str_short()}"
      )
