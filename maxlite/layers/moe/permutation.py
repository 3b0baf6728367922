"""Tokens laid out as rows of experts and back, by gathers in both directions.

`permute` and `unpermute` are linear maps and each other's adjoint, so no scatter-add appears in the
backward pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Permutation:
  """Which assignment (t * K + k) each of M rows holds, and which row each assignment has.

  Rows without an assignment, and assignments without a row, point past the end of the other.
  """

  assignment_M: jax.Array
  row_TK: jax.Array


def sort_by_expert(expert_TK: jax.Array, num_experts: int, num_rows: int) -> tuple:
  """(Permutation, group_sizes_E): the assignments sorted by expert, stably, in `num_rows` rows.

  An assignment to no expert (`expert_TK` out of range) gets no row. Sorts by counting.
  """
  expert_A = expert_TK.reshape(-1)
  chosen_AE = (expert_A[:, None] == jnp.arange(num_experts, dtype=expert_A.dtype)[None]).astype(
    jnp.int32
  )
  group_sizes_E = jnp.sum(chosen_AE, axis=0, dtype=jnp.int32)
  start_E = jnp.cumsum(group_sizes_E, dtype=jnp.int32) - group_sizes_E
  before_AE = jnp.cumsum(chosen_AE, axis=0, dtype=jnp.int32) - chosen_AE
  row_A = jnp.sum((start_E[None] + before_AE) * chosen_AE, axis=1, dtype=jnp.int32)
  row_A = jnp.where(jnp.any(chosen_AE > 0, axis=1), row_A, num_rows)
  return Permutation(invert(row_A, num_rows), row_A.reshape(expert_TK.shape)), group_sizes_E


def invert(row_A: jax.Array, num_rows: int) -> jax.Array:
  """assignment_M: which element of `row_A` names each row; `row_A.size` where none does."""
  assignment_A = jnp.arange(row_A.size, dtype=row_A.dtype)
  none_M = jnp.full_like(row_A, row_A.size, shape=(num_rows,))
  return none_M.at[row_A].set(assignment_A, mode="drop")


@jax.custom_vjp
def permute(x_TD: jax.Array, layout: Permutation) -> jax.Array:
  """x_MD: every token's row, once for each of its assignments; zero in rows without one."""
  token_M = layout.assignment_M // layout.row_TK.shape[1]
  return jnp.take(x_TD, token_M, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def unpermute(y_MD: jax.Array, layout: Permutation) -> jax.Array:
  """y_TD: the sum of each token's rows, accumulated in float32."""
  y_TKD = jnp.take(y_MD, layout.row_TK, axis=0, mode="fill", fill_value=0)
  accumulator = np.promote_types(y_MD.dtype, jnp.float32)
  return jnp.sum(y_TKD, axis=1, dtype=accumulator).astype(y_MD.dtype)


permute.defvjp(
  lambda x_TD, layout: (permute(x_TD, layout), layout),
  lambda layout, dx_MD: (unpermute(dx_MD, layout), None),
)
unpermute.defvjp(
  lambda y_MD, layout: (unpermute(y_MD, layout), layout),
  lambda layout, dy_TD: (permute(dy_TD, layout), None),
)


@jax.custom_vjp
def permute_weights(weight_TK: jax.Array, layout: Permutation) -> jax.Array:
  """weight_M: each row's assignment's weight; zero in rows without one."""
  return jnp.take(weight_TK.reshape(-1), layout.assignment_M, mode="fill", fill_value=0)


permute_weights.defvjp(
  lambda weight_TK, layout: (permute_weights(weight_TK, layout), layout),
  lambda layout, dw_M: (jnp.take(dw_M, layout.row_TK, mode="fill", fill_value=0), None),
)
