"""Numeric conventions shared by all kernels: accumulation type, products, soft cap."""

from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

_Integer = TypeVar("_Integer", int, jax.Array)


def accumulator_dtype(dtype: jnp.dtype) -> np.dtype:
  """The type in which products of `dtype` are summed: float32, or `dtype` if it is wider."""
  return np.promote_types(dtype, np.float32)


def dot(x: jax.Array, y: jax.Array, contract: tuple[int, int], num_batch: int = 0) -> jax.Array:
  """Product of x and y, in the accumulator type.

  Args:
    x, y: arrays of one type.
    contract: the axis of x and the axis of y that are summed over.
    num_batch: number of leading axes that are batch axes.
  """
  x_axis, y_axis = contract
  batch = tuple(range(num_batch))
  return jax.lax.dot_general(
    x,
    y,
    dimension_numbers=(((x_axis,), (y_axis,)), (batch, batch)),
    preferred_element_type=accumulator_dtype(x.dtype),
  )


def sum_arrays(terms: Sequence[jax.Array]) -> jax.Array:
  """The sum of at least one array."""
  total = terms[0]
  for term in terms[1:]:
    total = total + term
  return total


def apply_soft_cap(x: jax.Array, soft_cap: float) -> jax.Array:
  """soft_cap tanh(x / soft_cap), in x's type; x if soft_cap is 0.

  Source: Gemma 2 (2024), section 2.
  """
  if not soft_cap:
    return x
  return soft_cap * jnp.tanh(x / soft_cap)


def ceil_div(a: _Integer, b: int) -> _Integer:
  """a / b rounded up; also for int32 arrays, where `pl.cdiv` fails if 64-bit types are enabled."""
  return (a + b - 1) // b
