"""Checks of what the Python APIs are given: states, optimizers and the values of losses."""

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import flax.errors
import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlite.errors import UserError
from maxlite.sharding.pytree import PyTree


def check_not_donated(state: PyTree) -> None:
  """Raise UserError if an array of `state` was donated to an earlier step."""
  for leaf in jax.tree.leaves(state):
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
      raise UserError(
        "this state was donated to an earlier step: continue with the state that the step "
        "returned, or give it a copy, jax.tree.map(jnp.copy, state)"
      )


def as_optimizer(value: Any, place: str) -> optax.GradientTransformation:
  """The optimizer that was given for `place`; `optax.MultiSteps` becomes a transformation.

  Raises:
    UserError: it is not an optimizer.
  """
  if isinstance(value, optax.MultiSteps):
    return value.gradient_transformation()
  if isinstance(value, str):
    example = "adam"
    if hasattr(optax, value):
      example = value
    raise UserError(
      f"{place} has optimizer={value!r}, a string; give an optimizer, as optax.{example}(1e-3)"
    )
  if not hasattr(value, "init") or not hasattr(value, "update"):
    name = getattr(value, "__name__", type(value).__name__)
    call = f"{name}(...)" if callable(value) else "optax.adam(1e-3)"
    raise UserError(f"{place} has optimizer={name}; give an optimizer, as {call}")
  return value


@contextlib.contextmanager
def explain_collections(place: str, remedy: str) -> Iterator[None]:
  """Raise UserError where a Flax module changes or lacks a collection of variables.

  Args:
    place: the function that applies the module.
    remedy: what to write instead, in which `{name}` stands for the collection.
  """
  try:
    yield
  except (flax.errors.ModifyScopeVariableError, flax.errors.ScopeCollectionNotFound) as error:
    text = " ".join(str(error).split())
    found = re.search(r'collection "([^"]+)"', text)
    if found is None:
      raise
    name = found.group(1)
    problem = f"reads the collection {name}, which it does not get"
    if isinstance(error, flax.errors.ModifyScopeVariableError):
      problem = f"changes the collection {name}, which is immutable there"
    raise UserError(
      f"{place} applies a module that {problem}: {remedy.format(name=name)}"
    ) from error


def check_scalars(values: Mapping[str, object], place: str) -> None:
  """Raise UserError if one of the values that the loss of `place` returned is not a scalar."""
  for name, x in values.items():
    if x is None:
      raise UserError(f"{name!r} of {place} is None; return the loss at the end of its function")
    if isinstance(x, jax.Array | np.ndarray | np.generic | int | float):
      if not jnp.shape(x) and jnp.issubdtype(jnp.result_type(x), jnp.floating):
        continue
      found = jax.typeof(x).str_short()
    else:
      found = type(x).__name__
    raise UserError(
      f"{name!r} of {place} is {found}; a loss returns a floating scalar (take jnp.mean), or "
      "(scalar, {name: scalar})"
    )


def check_unreserved(metrics: Mapping[str, object], reserved: tuple[str, ...], place: str) -> None:
  """Raise UserError if the loss of `place` logs a name that the step itself logs."""
  for name in reserved:
    if name in metrics:
      raise UserError(f"{name!r} of {place} is a metric of the step: give it another name")
