"""Which library a model is of, from its type."""

import functools
import inspect
import sys
from collections.abc import Callable, Hashable
from typing import Any

import flax.linen as nn
import jax

from maxlite.errors import UserError
from maxlite.libraries.identity import identity
from maxlite.libraries.model import Model
from maxlite.sharding.pytree import PyTree

FORMS = (
  "a Linen module, an Equinox module, an NNX module, a function of a random key that makes one of "
  "the latter two, or init= and apply="
)


def library_of(value: Any) -> str:
  """`linen`, `equinox` or `nnx`, if the value is a model of it; otherwise an empty string.

  An Equinox model with state is a tuple of both. A library that the program has not imported has
  no models, so none is imported here.
  """
  if isinstance(value, nn.Module):
    return "linen"
  equinox: Any = sys.modules.get("equinox")
  if equinox is not None:
    module = value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], equinox.nn.State):
      module, _ = value
    if isinstance(module, equinox.Module):
      return "equinox"
  nnx: Any = sys.modules.get("flax.nnx")
  if nnx is not None and isinstance(value, nnx.Module):
    return "nnx"
  return ""


def as_model(value: Any, place: str) -> Model:
  """The model of Equinox or NNX that was given as an object, or as a function that makes one.

  Args:
    value: the object; or a function of a random key, or of `rngs` as constructors of NNX are.
    place: what it was given for, for messages.

  Raises:
    UserError: it is something else.
  """
  library = library_of(value)
  if library:
    return _build(library, lambda _key: value, ("given", library), place, given=value)
  if not callable(value):
    raise UserError(f"{place} is a {type(value).__name__}; give {FORMS}")
  make = _function_of_key(value)
  made: list[PyTree] = []

  def probe(key: jax.Array) -> None:
    made.append(make(key))

  jax.eval_shape(probe, jax.random.key(0))
  return _build(library_of(made[0]), make, identity(value), place)


def _build(
  library: str, make: Callable, draw_key: Hashable, place: str, given: PyTree = None
) -> Model:
  if library == "equinox":
    from maxlite.libraries.equinox_model import EquinoxModel

    return EquinoxModel(make, draw_key, given)
  if library == "nnx":
    from maxlite.libraries.nnx_model import NnxModel

    return NnxModel(make, draw_key, given)
  raise UserError(f"{place} makes no module of Equinox or NNX; give {FORMS}")


def _function_of_key(function: Callable) -> Callable[[jax.Array], PyTree]:
  """The function as one of a random key, whatever the name of its argument."""
  names = _free_parameters(function)
  if "rngs" in names:
    from flax import nnx

    return lambda key: function(rngs=nnx.Rngs(key))
  if "key" in names:
    return lambda key: function(key=key)
  return function


def _free_parameters(function: Callable) -> set[str]:
  """The names by which arguments can be given, without those that `functools.partial` gives."""
  given: set[str] = set()
  inner: Any = function
  while isinstance(inner, functools.partial):
    given |= inner.keywords.keys()
    inner = inner.func
  if isinstance(inner, type):
    inner = inspect.getattr_static(inner, "__init__")  # its signature may be its metaclass's
  try:
    parameters = inspect.signature(inner).parameters.values()
  except ValueError:  # a builtin without a signature
    return set()
  return {each.name for each in parameters if each.kind != each.POSITIONAL_ONLY} - given
