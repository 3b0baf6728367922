"""Models of Equinox: a module, or a module and its `equinox.nn.State`."""

import functools
from collections.abc import Callable, Hashable

import equinox as eqx
import jax
from flax.traverse_util import unflatten_dict

from maxlite.libraries.calls import Returned, extra_arguments, returned
from maxlite.libraries.identity import identity
from maxlite.libraries.model import (
  KeyImpls,
  Model,
  Setting,
  Variables,
  array_settings,
  first_settings,
  plain_arrays,
  shapes_key,
)
from maxlite.optim.labels import names_of
from maxlite.sharding.pytree import PyTree


class EquinoxModel(Model):
  """The parameters are the floating-point arrays of the module, `eqx.is_inexact_array`.

  Its other arrays are the collection `constants`, which never changes, and its state the collection
  `state`, by the paths of the layers. A loss that has an argument `state` gets the state and
  returns (scalar, {name: scalar}, state).
  """

  def __init__(self, make: Callable[[jax.Array], PyTree], draw_key: Hashable, given: PyTree = None):
    """
    Args:
      make: a function of a random key that makes the module, or (module, state).
      draw_key: equal for functions that make the same.
      given: what `make` returns, if it was given as an object.
    """
    self._make = make
    self.draw_key = draw_key

    def arrays(key: jax.Array) -> Variables:
      made = make(key)
      self._keep_structure(made)
      return self._raw_variables(made)

    self.abstract = jax.eval_shape(lambda key: plain_arrays(arrays(key)), jax.random.key(0))
    if given is not None:
      self.given = plain_arrays(self._raw_variables(given))
    self.key = (identity(self._static), shapes_key(self.abstract))

  def _keep_structure(self, made: PyTree) -> None:
    """Remember all of a model that is not an array."""
    self._has_state = isinstance(made, tuple)
    module = made[0] if self._has_state else made
    self._module = jax.tree.map(lambda leaf: _shape(leaf) if eqx.is_array(leaf) else leaf, module)
    self._static = eqx.filter(module, eqx.is_array, inverse=True)
    self._impls = KeyImpls(eqx.filter(module, _is_constant))
    self.name = type(module).__name__
    # By path of a layer's `StateIndex`, its marker in the state.
    self._markers: dict[tuple[str, ...], Hashable] = {}
    self._markers_in_order: tuple[Hashable, ...] = ()
    if self._has_state:
      _, self._markers_in_order = made[1].tree_flatten()
      for key_path, leaf in jax.tree.leaves_with_path(module, is_leaf=_is_index):
        if _is_index(leaf):
          self._markers[names_of(key_path)] = leaf.marker

  def _raw_variables(self, made: PyTree) -> Variables:
    module = made[0] if self._has_state else made
    variables = {"params": eqx.filter(module, eqx.is_inexact_array)}
    constants = eqx.filter(module, _is_constant)
    if jax.tree.leaves(constants):
      variables["constants"] = constants
    if self._has_state:
      variables["state"] = self._by_path(made[1])
    return variables

  def _by_path(self, state: eqx.nn.State) -> dict[str, PyTree]:
    """The state as nested dicts, in which phases find the layers."""
    values, markers = state.tree_flatten()
    by_marker = dict(zip(markers, values, strict=True))
    return unflatten_dict({path: by_marker[marker] for path, marker in self._markers.items()})

  def _state(self, by_path: dict[str, PyTree]) -> eqx.nn.State:
    by_marker = {}
    for path, marker in self._markers.items():
      by_marker[marker] = functools.reduce(lambda tree, name: tree[name], path, by_path)
    values = [by_marker[marker] for marker in self._markers_in_order]
    return eqx.nn.State.tree_unflatten(self._markers_in_order, values)

  def _bind(self, variables: Variables) -> eqx.Module:
    parts = [variables["params"], self._static]
    if "constants" in variables:
      parts.append(self._impls.wrap(variables["constants"]))
    return eqx.combine(*parts)

  def draw(self, key: jax.Array) -> Variables:
    return plain_arrays(self._raw_variables(self._make(key)))

  def call(
    self,
    function: Callable[..., PyTree],
    variables: Variables,
    batch: PyTree,
    key: jax.Array,
    place: str,
    value: str = "scalar",
  ) -> Returned:
    offered: dict[str, PyTree] = {"key": key}
    if self._has_state:
      offered["state"] = self._state(variables["state"])
    arguments = extra_arguments(function, offered)
    result = function(self._bind(variables), batch, **arguments)
    collections = {name: tree for name, tree in variables.items() if name != "params"}
    if "state" not in arguments:
      return returned(result, place, value=value)._replace(collections=collections)
    after = returned(result, place, value=value, state_name="state", state=offered["state"])
    collections["state"] = plain_arrays(self._by_path(after.collections))
    return after._replace(collections=collections)

  def predict(
    self, function: Callable[..., PyTree], variables: Variables, inputs: PyTree
  ) -> PyTree:
    offered = {}
    if self._has_state:
      offered["state"] = self._state(variables["state"])
    return function(self._bind(variables), inputs, **extra_arguments(function, offered))

  def own(self, variables: Variables) -> PyTree:
    module = self._bind(variables)
    if self._has_state:
      return module, self._state(variables["state"])
    return module

  def params_of(self, model: PyTree) -> PyTree:
    module = model[0] if isinstance(model, tuple) else model
    return eqx.filter(module, eqx.is_inexact_array)

  def settings(self) -> dict[str, Setting]:
    kind: type = type(self._module)
    return {
      "model": Setting(kind, kind.__name__),
      **first_settings(vars(self._module)),
      **array_settings(self.abstract),
    }


def _is_constant(leaf: PyTree) -> bool:
  return eqx.is_array(leaf) and not eqx.is_inexact_array(leaf)


def _is_index(node: PyTree) -> bool:
  return isinstance(node, eqx.nn.StateIndex)


def _shape(leaf: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
