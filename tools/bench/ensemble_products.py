"""The matrix products of one hidden layer per member, as candidates of ensemble.py."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ensemble_candidate import Candidate, RepeatedStep, Step
from ensemble_problems import NUM_ROWS, PROBLEMS, WIDTHS

from maxlite.kernels.grouped_matmul.api import grouped_matmul


class HiddenLayer(NamedTuple):
  """The operands of one hidden layer: its input, its weights, and the gradient of its product."""

  x_BD: jax.Array
  w_DF: jax.Array
  dy_BF: jax.Array


def hidden_layers(problem: str) -> list[HiddenLayer]:
  """Random operands of one hidden layer per member."""
  layers = []
  for z, model in enumerate(PROBLEMS[problem]().models):
    rng = np.random.default_rng(z)
    arrays = []
    for num_rows in (NUM_ROWS, model.width, NUM_ROWS):
      numbers = rng.standard_normal((num_rows, model.width))
      arrays.append(jnp.asarray(numbers, jnp.float32))
    layers.append(HiddenLayer._make(arrays))
  return layers


def a_dot_each(problem: str) -> Candidate:
  """The three products of every member, forward and backward."""

  def multiply_all(layers: list[HiddenLayer], _: None) -> tuple[list[HiddenLayer], list]:
    products = []
    for x_BD, w_DF, dy_BF in layers:
      y_BF = x_BD @ w_DF
      dx_BD = dy_BF @ w_DF.T
      dw_DF = x_BD.T @ dy_BF
      products.append((y_BF, dx_BD, dw_DF))
    return layers, products

  return candidate_of_products(multiply_all, hidden_layers(problem))


def one_grouped_matmul(problem: str) -> Candidate:
  """The three products as the forward and backward pass of one grouped matmul.

  Rows are the members' input units M, grouped by member; output units are padded to the largest
  width F: dw_MF = x_MB dy_ZBF, and its gradients for a cotangent w_MF are dx_MB and y_ZBF.
  """
  layers = hidden_layers(problem)
  size_Z = jnp.asarray([layer.w_DF.shape[0] for layer in layers])
  x_MB = jnp.concatenate([layer.x_BD.T for layer in layers])
  w_MF = jnp.concatenate([pad_columns(layer.w_DF) for layer in layers])
  dy_ZBF = jnp.stack([pad_columns(layer.dy_BF) for layer in layers])
  multiply = functools.partial(grouped_matmul, group_sizes_G=size_Z, backend="tiled")

  def multiply_all(operands: tuple, _: None) -> tuple[tuple, tuple]:
    x_MB, w_MF, dy_ZBF = operands
    dw_MF, gradients = jax.vjp(multiply, x_MB, dy_ZBF)
    return operands, (dw_MF, gradients(w_MF))

  num_useful = sum(layer.w_DF.size for layer in layers)
  share = num_useful / w_MF.size
  return candidate_of_products(multiply_all, (x_MB, w_MF, dy_ZBF), share)


def pad_columns(array: jax.Array) -> jax.Array:
  """Pad a matrix with zero columns to the largest width."""
  num_missing = max(WIDTHS) - array.shape[1]
  return jnp.pad(array, ((0, 0), (0, num_missing)))


def candidate_of_products(
  multiply_all: Step,
  operands: Any,
  share: float = 1.0,
) -> Candidate:
  num_steps = 10
  program = jax.jit(multiply_all, donate_argnums=0)
  repeated = RepeatedStep(program, operands, None, num_steps)
  return Candidate(repeated.run, num_steps, share)
