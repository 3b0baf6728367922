"""Models of Flax NNX."""

from collections.abc import Callable, Hashable, Mapping

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.errors import UserError
from maxlite.libraries.calls import Returned, extra_arguments, returned
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
from maxlite.sharding.pytree import PyTree


class NnxModel(Model):
  """The parameters are the variables of type `nnx.Param`, as nested dicts.

  All other variables (batch statistics, streams of random numbers) are the collection `variables`:
  what a loss changes in them is kept.
  """

  def __init__(
    self,
    make: Callable[[jax.Array], nnx.Module],
    draw_key: Hashable,
    given: nnx.Module | None = None,
  ):
    """
    Args:
      make: a function of a random key that makes the module.
      draw_key: equal for functions that make the same.
      given: what `make` returns, if it was given as an object.
    """
    self._make = make
    self.draw_key = draw_key
    self._graph: nnx.GraphDef
    self._impls: KeyImpls

    def arrays(key: jax.Array) -> tuple[nnx.State, nnx.State]:
      module = make(key)
      self.name = type(module).__name__
      self._fields = first_settings(vars(module))
      self._graph, params, others = _split(module)
      self._impls = KeyImpls(_as_dict(others))
      return params, others

    self._params, self._others = jax.eval_shape(arrays, jax.random.key(0))
    self.abstract = jax.eval_shape(self.draw, jax.random.key(0))
    if given is not None:
      self.given = self._variables_of(given)
    self.key = (_graph_key(self._graph), shapes_key(self.abstract))

  def _variables_of(self, module: nnx.Module) -> Variables:
    _, params, others = _split(module)
    variables = {"params": plain_arrays(_as_dict(params))}
    if jax.tree.leaves(others):
      variables["variables"] = plain_arrays(_as_dict(others))
    return variables

  def _bind(self, variables: Variables) -> nnx.Module:
    others = variables.get("variables", {})
    return nnx.merge(
      self._graph,
      _with_values(self._params, variables["params"]),
      _with_values(self._others, self._impls.wrap(others)),
    )

  def draw(self, key: jax.Array) -> Variables:
    return self._variables_of(self._make(key))

  def call(
    self,
    function: Callable[..., PyTree],
    variables: Variables,
    batch: PyTree,
    key: jax.Array,
    place: str,
    value: str = "scalar",
  ) -> Returned:
    module = self._bind(variables)
    result = function(module, batch, **extra_arguments(function, {"key": key}))
    after_call = returned(result, place, value=value)
    _, params, others = _split(module)
    if value == "scalar":
      _check_unchanged(variables["params"], _as_dict(params), place)
    collections = {}
    if "variables" in variables:
      # Variables that the call created, such as those of `Module.sow`, are not kept.
      after = flatten_dict(plain_arrays(_as_dict(others)))
      paths = flatten_dict(variables["variables"])
      missing = sorted("/".join(path) for path in paths.keys() - after.keys())
      if missing:
        raise UserError(f"{place} removes {missing[0]} from the module: leave it in")
      collections["variables"] = unflatten_dict({path: after[path] for path in paths})
    return after_call._replace(collections=collections)

  def predict(
    self, function: Callable[..., PyTree], variables: Variables, inputs: PyTree
  ) -> PyTree:
    return function(self._bind(variables), inputs)

  def own(self, variables: Variables) -> nnx.Module:
    return self._bind(variables)

  def params_of(self, model: nnx.Module) -> PyTree:
    return self._variables_of(model)["params"]

  def settings(self) -> dict[str, Setting]:
    kind = Setting(self.name, self.name)
    return {"model": kind, **self._fields, **array_settings(self.abstract)}


def _split(module: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
  """(structure, parameters, other variables)."""
  graph, *states = nnx.split(module, nnx.Param, ...)
  params, others = states
  return graph, params, others


def _check_unchanged(before: PyTree, after: PyTree, place: str) -> None:
  """Raise UserError if a loss assigned to a parameter, whose value would be lost."""
  after_by_path = flatten_dict(after)
  for path, leaf in flatten_dict(before).items():
    if after_by_path.get(path) is not leaf:
      raise UserError(
        f"{place} changes the parameter {'/'.join(path)}, which only the optimizer may: make it "
        "a variable of another type, or change it in a phase with update="
      )


def _as_dict(state: nnx.State) -> dict[str, PyTree]:
  """The values of a state as nested dicts; numbers of lists are names, as in a checkpoint."""
  values = {}
  for path, variable in nnx.to_flat_state(state):
    values[tuple(map(str, path))] = variable.get_value()
  return unflatten_dict(values)


def _with_values(state: nnx.State, values: Mapping[str, PyTree]) -> nnx.State:
  """The state with values from nested dicts."""
  flat_values = flatten_dict(values)
  replaced = []
  for path, variable in nnx.to_flat_state(state):
    replaced.append((path, variable.replace(flat_values[tuple(map(str, path))])))
  return nnx.from_flat_state(replaced)


def _graph_key(graph: nnx.GraphDef) -> Hashable:
  """Equal for modules that differ in their arrays at most; the text tells 1 from 1.0."""
  try:
    hash(graph)
  except TypeError:  # an attribute that cannot be compared
    return id(graph)
  return graph, repr(graph)
