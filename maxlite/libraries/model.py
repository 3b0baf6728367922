"""The contract of a model of any module library."""

import abc
import math
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.libraries.calls import Returned
from maxlite.optim.labels import path_of
from maxlite.sharding.pytree import PyTree

# {"params": the parameters, name of a collection: other arrays}
Variables = dict[str, PyTree]


class Setting(NamedTuple):
  """A field of a model or a key of a config."""

  key: Hashable  # equal if the values are
  text: str


class Model(abc.ABC):
  """A model as pure functions of its arrays.

  Its arrays are `Variables`: parameters, which have a gradient, and collections, which have none
  and may change in every step. Random keys in them are their raw bits.
  """

  name: str  # for messages
  abstract: Variables  # shapes and dtypes
  # The arrays of a model that was given with them; None: `draw` makes them from a key.
  given: Variables | None = None
  # Models with one `key` compute the same from equal arrays; those that also have one `draw_key`
  # draw the same arrays from equal keys.
  key: Hashable
  draw_key: Hashable

  @abc.abstractmethod
  def draw(self, key: jax.Array) -> Variables:
    """The arrays for a random key; they may have logical names (`nn.Partitioned`)."""

  @abc.abstractmethod
  def call(
    self,
    function: Callable[..., PyTree],
    variables: Variables,
    batch: PyTree,
    key: jax.Array,
    place: str,
    value: str = "scalar",
  ) -> Returned:
    """Call function(the library's own model, batch), a loss or an update, and check its form.

    If it has an argument `key`, it gets the random key.

    Args:
      place: the function, for messages.
      value: what it returns first: the `scalar` of a loss, or the `model` of an update.

    Returns:
      What it returned, and the collections after the call.
    """

  @abc.abstractmethod
  def predict(
    self, function: Callable[..., PyTree], variables: Variables, inputs: PyTree
  ) -> PyTree:
    """The result of function(the library's own model, inputs); changes of collections are lost."""

  @abc.abstractmethod
  def own(self, variables: Variables) -> PyTree:
    """The model with these arrays, in the form in which it was given."""

  @abc.abstractmethod
  def params_of(self, model: PyTree) -> PyTree:
    """The parameters of a model of the library, in the form of those in `Variables`."""

  @abc.abstractmethod
  def settings(self) -> dict[str, Setting]:
    """By name, in what models of different groups may differ; names of arrays are paths."""


def array_settings(abstract: Variables) -> dict[str, Setting]:
  """The number of parameters, and the shape of every array by its path."""
  sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract["params"])]
  settings = {"parameters": Setting(sum(sizes), f"{sum(sizes):,}")}
  for collection, tree in abstract.items():
    for key_path, leaf in jax.tree.leaves_with_path(tree):
      text = f"{leaf.dtype}{list(leaf.shape)}"
      settings[f"{collection}/{path_of(key_path)}"] = Setting(text, text)
  return settings


def shapes_key(abstract: Variables) -> Hashable:
  """Equal for variables of equal paths, shapes and dtypes."""
  leaves = jax.tree.leaves_with_path(abstract)
  return tuple((path_of(key_path), leaf.shape, leaf.dtype) for key_path, leaf in leaves)


def plain_arrays(tree: PyTree) -> PyTree:
  """The arrays of a tree as a compiled step returns them: random keys as bits, no weak types."""

  def plain(leaf: PyTree) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.key_data(leaf)
    return jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))

  return jax.tree.map(plain, tree)


class KeyImpls:
  """Which arrays of a tree are random keys, and of which implementation."""

  def __init__(self, tree: PyTree):
    self._impls: dict[str, Hashable] = {}
    for key_path, leaf in jax.tree.leaves_with_path(tree):
      if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        self._impls[path_of(key_path)] = jax.random.key_impl(leaf)

  def wrap(self, tree: PyTree) -> PyTree:
    """The tree with random keys in place of their bits."""
    if not self._impls:
      return tree

    def wrap(key_path: tuple, leaf: jax.Array) -> jax.Array:
      impl = self._impls.get(path_of(key_path))
      return leaf if impl is None else jax.random.wrap_key_data(leaf, impl=impl)

    return jax.tree.map_with_path(wrap, tree)


def first_settings(fields: Mapping[str, object]) -> dict[str, Setting]:
  """The fields whose values are numbers, texts or functions."""
  settings = {}
  for name, value in fields.items():
    if isinstance(value, bool | int | float | str):
      settings[name] = Setting((type(value), repr(value)), str(value))
    elif callable(value) and hasattr(value, "__name__"):
      settings[name] = Setting(id(value), value.__name__)
  return settings
