"""Models that are a pair of pure functions."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.errors import UserError
from maxlite.libraries.calls import Returned, extra_arguments, returned
from maxlite.libraries.identity import identity
from maxlite.libraries.model import (
  KeyImpls,
  Model,
  Setting,
  Variables,
  array_settings,
  plain_arrays,
  shapes_key,
)
from maxlite.optim.labels import FROZEN, TRAIN, merge, path_of, split
from maxlite.sharding.pytree import PyTree


class FunctionModel(Model):
  """init(key) -> a tree of arrays, and apply(tree, ...).

  A loss gets `apply` with the tree as its first argument, so that it calls model(inputs).
  """

  def __init__(self, init: Callable[[jax.Array], PyTree], apply: Callable[..., PyTree]):
    self._init = init
    self._apply = apply
    self.name = getattr(apply, "__name__", type(apply).__name__)

    def arrays(key: jax.Array) -> PyTree:
      tree = init(key)
      for key_path, leaf in jax.tree.leaves_with_path(tree):
        if not isinstance(leaf, jax.Array | np.ndarray):
          raise UserError(
            f"init of {self.name} returns {path_of(key_path)}, a {type(leaf).__name__}, which is "
            "not an array: give its value to apply"
          )
      self._impls = KeyImpls(tree)
      return plain_arrays(tree)

    tree = jax.eval_shape(arrays, jax.random.key(0))

    def label(leaf: jax.ShapeDtypeStruct) -> str:
      return TRAIN if jnp.issubdtype(leaf.dtype, jnp.inexact) else FROZEN

    self._labels = jax.tree.map(label, tree)
    self.abstract = self._variables(tree)
    self.draw_key = identity(init)
    self.key = (identity(apply), jax.tree.structure(tree), shapes_key(self.abstract))

  def _variables(self, tree: PyTree) -> Variables:
    params, constants = split(tree, self._labels)
    if jax.tree.leaves(constants):
      return {"params": params, "constants": constants}
    return {"params": params}

  def _bind(self, variables: Variables) -> Callable[..., PyTree]:
    return functools.partial(self._apply, self.own(variables))

  def draw(self, key: jax.Array) -> Variables:
    return self._variables(plain_arrays(self._init(key)))

  def call(
    self,
    function: Callable[..., PyTree],
    variables: Variables,
    batch: PyTree,
    key: jax.Array,
    place: str,
    value: str = "scalar",
  ) -> Returned:
    arguments = extra_arguments(function, {"key": key})
    result = function(self._bind(variables), batch, **arguments)
    collections = {name: tree for name, tree in variables.items() if name != "params"}
    return returned(result, place, value=value)._replace(collections=collections)

  def predict(
    self, function: Callable[..., PyTree], variables: Variables, inputs: PyTree
  ) -> PyTree:
    return function(self._bind(variables), inputs)

  def own(self, variables: Variables) -> PyTree:
    if "constants" not in variables:
      return variables["params"]
    return self._impls.wrap(merge(variables["params"], variables["constants"]))

  def params_of(self, model: PyTree) -> PyTree:
    params, _ = split(model, self._labels)
    return params

  def settings(self) -> dict[str, Setting]:
    return {"model": Setting(identity(self._apply), self.name), **array_settings(self.abstract)}
