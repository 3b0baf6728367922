"""Linen modules, whose variables follow from a loss and an example batch."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.errors import UserError
from maxlite.libraries.calls import Returned, extra_arguments, returned
from maxlite.libraries.identity import identity
from maxlite.libraries.model import Model, Setting, Variables
from maxlite.sharding.pytree import PyTree
from maxlite.step.api_checks import explain_collections

Path = tuple[str, ...]
_BOUND = "call the module that it is given, model(...), which keeps {name}, and not its apply"
_FIXED = (
  "predict reads {name} only, so give a predict that does not update it, such as "
  "lambda model, inputs: model(inputs, train=False)"
)


class LinenModel(Model):
  """The variables are those that `module.init` returns, without what the module sows.

  Their names are as Flax's. Modules draw all random numbers from the stream `params`.
  """

  def __init__(self, module: nn.Module, loss: Callable[..., PyTree], batch: PyTree):
    """Raise UserError if the module has no parameters."""
    self._module = module
    self.name = type(module).__name__
    self._init = nn.init(_with_key(loss, jax.random.key(0)), module)
    with explain_collections(f"the loss of the model {self.name}", _BOUND):
      variables = jax.eval_shape(self._init, jax.random.key(0), batch)
    if "params" not in variables:
      raise UserError(f"the model {self.name} has no parameters to train: leave it out")
    self._batch = batch
    self._mutable = tuple(name for name in variables if name != "params")
    self._sown = self._find_sown(loss, meta.unbox(variables))
    self.abstract = meta.unbox(dict(_without(variables, self._sown)))
    self.key = identity(module)
    self.draw_key = self.key

  def _find_sown(self, loss: Callable[..., PyTree], variables: Variables) -> frozenset[Path]:
    """Paths of variables that grow with every call, as by `Module.sow`: not part of the state."""

    def run(variables: PyTree, key: jax.Array) -> PyTree:
      apply = nn.apply(_with_key(loss, key), self._module, mutable=self._mutable)
      return apply(variables, self._batch, rngs={"params": key})

    _, updated = jax.eval_shape(run, variables, jax.random.key(0))
    before = flatten_dict({name: variables[name] for name in self._mutable})
    after = flatten_dict(updated)
    grown = set()
    for path in before | after:
      shapes_before = jax.tree.map(jnp.shape, before.get(path))
      shapes_after = jax.tree.map(jnp.shape, after.get(path))
      if shapes_before != shapes_after:
        grown.add(path)
    return frozenset(grown)

  def draw(self, key: jax.Array) -> Variables:
    return dict(_without(self._init(key, self._batch), self._sown))

  def call(
    self,
    function: Callable[..., PyTree],
    variables: Variables,
    batch: PyTree,
    key: jax.Array,
    place: str,
    value: str = "scalar",
  ) -> Returned:
    run = nn.apply(_with_key(function, key), self._module, mutable=self._mutable)
    with explain_collections(place, _BOUND):
      result, updated = run(variables, batch, rngs={"params": key})
    return returned(result, place, value=value)._replace(collections=_without(updated, self._sown))

  def predict(
    self, function: Callable[..., PyTree], variables: Variables, inputs: PyTree
  ) -> PyTree:
    with explain_collections(f"predict of the model {self.name}", _FIXED):
      return nn.apply(function, self._module)(variables, inputs)

  def own(self, variables: Variables) -> tuple[nn.Module, Variables]:
    return self._module, variables

  def params_of(self, model: PyTree) -> PyTree:
    """The parameters, which are what a user of Linen has."""
    return model

  def settings(self) -> dict[str, Setting]:
    return linen_settings(self._module)


def linen_settings(module: nn.Module) -> dict[str, Setting]:
  """The fields of a module."""
  kind: type = type(module)
  settings = {"model": Setting(kind, kind.__name__)}
  for field in dataclasses.fields(module):
    if field.name in ("parent", "name"):
      continue
    value = getattr(module, field.name)
    text = getattr(value, "__name__", repr(value))
    on_one_line = " ".join(text.split())
    settings[field.name] = Setting(identity(value), on_one_line)
  return settings


def _with_key(function: Callable[..., PyTree], key: jax.Array) -> Callable[..., PyTree]:
  """The function with the random key, if it takes one."""
  arguments = extra_arguments(function, {"key": key})
  if not arguments:
    return function
  return functools.partial(function, **arguments)


def _without(variables: Mapping[str, PyTree], paths: frozenset[Path]) -> Mapping[str, PyTree]:
  """The variables except those at `paths`."""
  if not paths:
    return variables
  flat = flatten_dict(variables, keep_empty_nodes=True)
  kept = {path: value for path, value in flat.items() if path not in paths}
  return unflatten_dict(kept)
