"""Tokens sorted by expert and back, by gathers in both directions.

`send` and `combine` are linear maps, each with the other's adjoint for a gradient; so no
scatter-add appears in the backward pass.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


@struct.dataclass
class Plan:
  """Where each of the A = T * K assignments lies once they are sorted by expert."""

  order_A: jax.Array  # assignment (t * K + k) at each sorted row
  inverse_A: jax.Array  # sorted row of each assignment
  group_sizes_E: jax.Array  # rows per expert


def build_plan(expert_TK: jax.Array, num_experts: int) -> Plan:
  """Plan that sorts the assignments by expert, stably, by counting (no comparison sort)."""
  expert_A = expert_TK.reshape(-1)
  chosen_AE = (expert_A[:, None] == jnp.arange(num_experts, dtype=expert_A.dtype)[None]).astype(
    jnp.int32
  )
  group_sizes_E = jnp.sum(chosen_AE, axis=0)
  start_E = jnp.cumsum(group_sizes_E) - group_sizes_E
  rank_A = jnp.sum((jnp.cumsum(chosen_AE, axis=0) - chosen_AE) * chosen_AE, axis=1)
  inverse_A = start_E[expert_A] + rank_A
  assignment_A = jnp.arange(expert_A.size, dtype=inverse_A.dtype)
  order_A = jnp.zeros_like(inverse_A).at[inverse_A].set(assignment_A, unique_indices=True)
  return Plan(order_A, inverse_A, group_sizes_E)


@jax.custom_vjp
def send(x_TD: jax.Array, plan: Plan) -> jax.Array:
  """x_MD: every token's row, once for each of its K experts, sorted by expert (M = T * K)."""
  num_chosen = plan.order_A.size // x_TD.shape[0]
  return jnp.take(x_TD, plan.order_A // num_chosen, axis=0, mode="clip")


@jax.custom_vjp
def fetch(y_MD: jax.Array, plan: Plan) -> jax.Array:
  """y_AD: row of each assignment in token order, the inverse of the sorting."""
  return jnp.take(y_MD, plan.inverse_A, axis=0, mode="clip")


def _send_forward(x_TD: jax.Array, plan: Plan) -> tuple:
  return send(x_TD, plan), (plan, x_TD.shape[0])


def _send_backward(residuals: tuple, g_MD: jax.Array) -> tuple:
  plan, num_tokens = residuals
  g_TKD = fetch(g_MD, plan).reshape(num_tokens, -1, g_MD.shape[-1])
  accumulator = np.promote_types(g_MD.dtype, jnp.float32)
  return jnp.sum(g_TKD, axis=1, dtype=accumulator).astype(g_MD.dtype), None


def _fetch_forward(y_MD: jax.Array, plan: Plan) -> tuple:
  return fetch(y_MD, plan), plan


def _fetch_backward(plan: Plan, g_AD: jax.Array) -> tuple:
  return jnp.take(g_AD, plan.order_A, axis=0, mode="clip"), None


send.defvjp(_send_forward, _send_backward)
fetch.defvjp(_fetch_forward, _fetch_backward)


def combine(y_MD: jax.Array, weight_TK: jax.Array, plan: Plan) -> jax.Array:
  """y_TD: each token's expert outputs, summed with its weights in float32."""
  y_TKD = fetch(y_MD, plan).reshape(*weight_TK.shape, -1).astype(weight_TK.dtype)
  return jnp.einsum("tkd,tk->td", y_TKD, weight_TK).astype(y_MD.dtype)
