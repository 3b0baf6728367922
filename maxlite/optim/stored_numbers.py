"""Hyperparameters as arrays in an optimizer's state, by `optax.inject_hyperparams`.

A group of ensemble members has one optimizer, and the hyperparameters in which its members differ
are in its state. The state of a solo run lacks them; the functions here convert between the two
forms.
"""

from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlite.sharding.pytree import PyTree

_Stored = optax.InjectStatefulHyperparamsState


def _is_stored(node: PyTree) -> bool:
  return isinstance(node, _Stored)


def set_numbers(
  opt_state: optax.OptState,
  values: Mapping[str, jax.Array | np.ndarray],
) -> optax.OptState:
  """The state with these values of the hyperparameters that it stores."""

  def with_values(node: PyTree) -> PyTree:
    if not _is_stored(node):
      return node
    return node._replace(hyperparams={**node.hyperparams, **values})

  return jax.tree.map(with_values, opt_state, is_leaf=_is_stored)


def without_numbers(opt_state: optax.OptState, kept: Collection[str]) -> optax.OptState:
  """The state of an optimizer that stores only the hyperparameters `kept`."""

  def strip(node: PyTree) -> PyTree:
    if not _is_stored(node):
      return node
    if not kept:
      return node.inner_state
    numbers = {name: value for name, value in node.hyperparams.items() if name in kept}
    return node._replace(hyperparams=numbers)

  return jax.tree.map(strip, opt_state, is_leaf=_is_stored)


def with_numbers(
  opt_state: optax.OptState,
  like: optax.OptState,
  values: Mapping[str, jax.Array],
  kept: Collection[str],
) -> optax.OptState:
  """The inverse of `without_numbers`.

  Args:
    like: a state of the optimizer that stores the hyperparameters; may be abstract.
    values: the hyperparameters that `opt_state` lacks.
    kept: names of the hyperparameters that `opt_state` stores.
  """

  def store(node: PyTree, given: PyTree) -> PyTree:
    if not _is_stored(node):
      return given
    if kept:
      return given._replace(hyperparams={**values, **given.hyperparams})
    return _Stored(jnp.zeros((), jnp.int32), dict(values), {}, given)

  return jax.tree.map(store, like, opt_state, is_leaf=_is_stored)
