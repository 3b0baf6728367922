"""Calls of a user's losses, updates and predictions, and the form of what they return."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax

from maxlite.errors import UserError
from maxlite.optim.labels import paths_in
from maxlite.sharding.pytree import PyTree, same_structure


class Returned(NamedTuple):
  """What a loss or an update returned."""

  value: PyTree  # The scalar of a loss, or the parameters of an update.
  metrics: Mapping[str, jax.Array]
  collections: PyTree


def extra_arguments(function: Callable, offered: Mapping[str, PyTree]) -> dict[str, PyTree]:
  """The `offered` arguments that a function takes, unless `functools.partial` gave them."""
  try:
    takes = inspect.signature(function).parameters
  except ValueError:  # a builtin without a signature
    return {}
  given = {}
  for name, value in offered.items():
    is_bound = isinstance(function, functools.partial) and name in function.keywords
    if name in takes and not is_bound:
      given[name] = value
  return given


def returned(
  result: PyTree,
  place: str,
  *,
  value: str = "scalar",
  params: PyTree = None,
  state_name: str = "",
  state: PyTree = None,
) -> Returned:
  """Name the 1 to 3 values that a function returned.

  Args:
    place: the function, for messages.
    value: the word for the first of them.
    params: of an update, which are one value if they are a tuple.
    state_name: the argument by which the function took `state`, which it must return then.

  Raises:
    UserError: it returned too few or too many values, or another state.
  """
  parts = (result,)
  if isinstance(result, tuple) and not (params is not None and same_structure(result, params)):
    parts = result
  is_valid = 1 <= len(parts) <= 3
  form = value
  if state_name:
    is_valid = len(parts) == 3
    form = f"{value}, {{name: scalar}}, {state_name}"
  if not is_valid:
    raise UserError(f"{place} returns {len(parts)} values, not ({form})")
  metrics: PyTree = {}
  if len(parts) > 1:
    metrics = parts[1]
  if not isinstance(metrics, Mapping):
    raise UserError(
      f"{place} returns a {type(metrics).__name__} as its second value, not a dict of metrics: "
      f"return ({value}, {{name: scalar}})"
    )
  updated = state
  if len(parts) > 2:
    updated = parts[2]
  changed = set(paths_in(updated)) ^ set(paths_in(state))
  if changed:
    raise UserError(
      f"{place} must return the {state_name or 'collections'} that it gets; they differ in "
      f"{', '.join(sorted(changed)[:3])}"
    )
  return Returned(parts[0], metrics, updated)
