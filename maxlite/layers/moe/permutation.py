"""Permutation of tokens into rows sorted by expert and back, by gathers in both directions.

`permute` and `unpermute` are linear and adjoint to each other, so the backward pass has no
scatter-add.
"""

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.kernels.numerics import accumulator_dtype


@struct.dataclass
class Permutation:
  """The assignment (t * K + k) of each of M rows, and the row of each assignment.

  Rows without an assignment, and assignments without a row, point past the end of the other.
  """

  assignment_M: jax.Array
  row_TK: jax.Array


def sort_by_expert(
  expert_TK: jax.Array,
  num_experts: int,
  num_rows: int,
) -> tuple[Permutation, jax.Array]:
  """(Permutation, group_sizes_E): a stable counting sort of the assignments into `num_rows` rows.

  Masked expert ids (out of range) get no row.
  """
  expert_A = expert_TK.reshape(-1)
  chosen_AE, before_AE = rank_by_expert(expert_A, num_experts)
  group_sizes_E = jnp.sum(chosen_AE, axis=0, dtype=jnp.int32)
  start_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32) - group_sizes_E
  row_A = jnp.sum((start_E[None] + before_AE) * chosen_AE, axis=1, dtype=jnp.int32)
  is_valid_A = jnp.any(chosen_AE > 0, axis=1)
  row_A = jnp.where(is_valid_A, row_A, num_rows)
  permutation = Permutation(
    assignment_M=invert(row_A, num_rows),
    row_TK=row_A.reshape(expert_TK.shape),
  )
  return permutation, group_sizes_E


def rank_by_expert(expert_A: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
  """(1 if assignment a is to expert e, number of earlier assignments to e), int32 [A, E] each."""
  experts_E = jnp.arange(num_experts, dtype=expert_A.dtype)
  chosen_AE = (expert_A[:, None] == experts_E[None]).astype(jnp.int32)
  up_to_AE = jnp.cumsum(chosen_AE, axis=0, dtype=jnp.int32)
  before_AE = up_to_AE - chosen_AE
  return chosen_AE, before_AE


def invert(row_A: jax.Array, num_rows: int) -> jax.Array:
  """assignment_M: the index in `row_A` of each row; `row_A.size` if there is none."""
  assignment_A = jnp.arange(row_A.size, dtype=row_A.dtype)
  none_M = jnp.full_like(row_A, row_A.size, shape=(num_rows,))
  return none_M.at[row_A].set(assignment_A, mode="drop")


@jax.custom_vjp
def permute(x_TD: jax.Array, permutation: Permutation) -> jax.Array:
  """x_MD: each token's row, of any shape, once per assignment; rows without one are undefined."""
  num_chosen = permutation.row_TK.shape[1]
  token_M = permutation.assignment_M // num_chosen
  return jnp.take(x_TD, token_M, axis=0, mode="clip")


@jax.custom_vjp
def unpermute(y_MD: jax.Array, permutation: Permutation) -> jax.Array:
  """y_TD: the sum of each token's rows, accumulated in float32."""
  row_KT = permutation.row_TK.T  # in the order [T, K], XLA:TPU copies the gathered rows
  y_KTD = jnp.take(y_MD, row_KT, axis=0, mode="fill", fill_value=0)
  y_TD = jnp.sum(y_KTD, axis=0, dtype=accumulator_dtype(y_MD.dtype))
  return y_TD.astype(y_MD.dtype)


def _permute_forward(x_TD: jax.Array, permutation: Permutation) -> tuple[jax.Array, Permutation]:
  return permute(x_TD, permutation), permutation


def _permute_backward(permutation: Permutation, dx_MD: jax.Array) -> tuple[jax.Array, None]:
  return unpermute(dx_MD, permutation), None


def _unpermute_forward(y_MD: jax.Array, permutation: Permutation) -> tuple[jax.Array, Permutation]:
  return unpermute(y_MD, permutation), permutation


def _unpermute_backward(permutation: Permutation, dy_TD: jax.Array) -> tuple[jax.Array, None]:
  return permute(dy_TD, permutation), None


permute.defvjp(_permute_forward, _permute_backward)
unpermute.defvjp(_unpermute_forward, _unpermute_backward)


@jax.custom_vjp
def permute_weights(weight_TK: jax.Array, permutation: Permutation) -> jax.Array:
  """weight_M: the weight of each row's assignment; zero in rows without one."""
  weight_A = weight_TK.reshape(-1)
  return jnp.take(weight_A, permutation.assignment_M, mode="fill", fill_value=0)


def _permute_weights_forward(
  weight_TK: jax.Array,
  permutation: Permutation,
) -> tuple[jax.Array, Permutation]:
  return permute_weights(weight_TK, permutation), permutation


def _permute_weights_backward(
  permutation: Permutation,
  dweight_M: jax.Array,
) -> tuple[jax.Array, None]:
  dweight_TK = jnp.take(dweight_M, permutation.row_TK, mode="fill", fill_value=0)
  return dweight_TK, None


permute_weights.defvjp(_permute_weights_forward, _permute_weights_backward)
