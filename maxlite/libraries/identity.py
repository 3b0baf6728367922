"""Keys that only values share with which a model computes the same."""

import dataclasses
import functools
import types
from collections.abc import Hashable, Mapping, Sequence

import flax.linen as nn
import jax

_FLAX_INTERNALS = ("_id", "_state", "_parent_ref", "scope")  # attributes of modules, not fields
_SCALARS = (bool, int, float, str, bytes, type(None))


def identity(value: object, modules: dict[Hashable, int] | None = None) -> Hashable:
  """A key that only values share with which a module computes the same.

  Equality does not suffice: 1 == 1.0 == True, 0.0 == -0.0, a dataclass may leave fields out of it,
  and a submodule that is in two fields has its parameters once. Functions from one place in the
  code are the same if they close over equal numbers and texts. Values whose type is not known here
  are compared by identity, and must live as long as the key.

  Args:
    modules: the numbers of the Linen modules so far, in the order of their first use.
  """
  if modules is None:
    modules = {}
  if isinstance(value, nn.Module):
    flax_id = vars(value)["_id"]  # by which Flax shares the parameters of a module
    number = modules.setdefault(flax_id, len(modules))
    fields = {name: x for name, x in vars(value).items() if name not in _FLAX_INTERNALS}
    return type(value), number, identity(fields, modules)
  if type(value) in _SCALARS:
    return type(value), repr(value)
  if isinstance(value, jax.ShapeDtypeStruct):
    return value.shape, value.dtype
  if isinstance(value, types.FunctionType):
    return _function_identity(value)
  contents = _contents(value)
  if contents is None:
    return id(value)
  return type(value), tuple(identity(item, modules) for item in contents)


def _contents(value: object) -> Sequence[object] | None:
  """What makes a container; None: it is none that is known here."""
  if isinstance(value, tuple | list):
    return value
  if isinstance(value, Mapping):
    return tuple(value.items())
  if isinstance(value, functools.partial):
    return value.func, value.args, value.keywords
  if dataclasses.is_dataclass(value) and not jax.tree_util.all_leaves([value]):
    # A tree whose fields are its contents, such as a module of Equinox; a field may be unset.
    return tuple((each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value))
  return None


def _function_identity(function: types.FunctionType) -> Hashable:
  """The code of a function with the values that it closes over and its defaults."""
  defaults = function.__kwdefaults__ or {}
  values = [*(function.__defaults__ or ()), *defaults, *defaults.values()]
  try:
    values += [cell.cell_contents for cell in function.__closure__ or ()]
  except ValueError:  # a variable that is not assigned yet
    return id(function)
  if vars(function):  # attributes, which it may read
    return id(function)
  kept = [identity(value) if type(value) in _SCALARS else id(value) for value in values]
  return id(function.__code__), id(function.__globals__), tuple(kept)
