"""A fixed number of slots per expert and row of the batch; assignments beyond it are dropped.

All shapes are static, so XLA inserts an ordinary all-to-all between shards.

Source: Lepikhin et al., GShard (2020), algorithm 1, with a batch row as a group.
"""

import math

import jax
import jax.numpy as jnp

from maxlite.layers.moe.dispatch.dense import dense_mlp
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.permutation import (
  Permutation,
  invert,
  permute,
  permute_weights,
  rank_by_expert,
  unpermute,
)
from maxlite.layers.moe.router import Route

_SLOTS = ("activation_batch_no_exp", "activation_exp", None, None)


def apply_experts(
  mlp: ExpertMlp, x_BTD: jax.Array, route: Route, weights: ExpertWeights
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, number of assignments dropped); earlier tokens of a row have priority."""
  cfg, sharder = mlp.cfg, mlp.sharder
  num_rows, num_tokens, num_chosen = route.expert_BTK.shape
  even_load = num_tokens * num_chosen / cfg.num_experts
  num_slots = min(math.ceil(cfg.capacity_factor * even_load), num_tokens)
  order, num_dropped_B = jax.vmap(lambda e: _assign_slots(e, cfg.num_experts, num_slots))(
    route.expert_BTK
  )
  by_expert = lambda x: x.reshape(num_rows, cfg.num_experts, num_slots, -1)
  x_BECD = sharder.constrain(by_expert(jax.vmap(permute)(x_BTD, order)), _SLOTS)
  weight_BEC1 = by_expert(jax.vmap(permute_weights)(route.weight_BTK, order)).astype(x_BTD.dtype)
  y_BECD = dense_mlp(mlp, x_BECD, weight_BEC1[..., 0], weights, "becd", "becf", "becd")
  y_BECD = sharder.constrain(y_BECD, _SLOTS)
  y_BTD = jax.vmap(unpermute)(y_BECD.reshape(num_rows, -1, x_BTD.shape[-1]), order)
  return y_BTD, jnp.sum(num_dropped_B, dtype=jnp.int32)


def _assign_slots(expert_TK: jax.Array, num_experts: int, num_slots: int) -> tuple:
  """(Permutation into experts x slots, assignments without a slot) of one row of the batch."""
  expert_A = expert_TK.reshape(-1)
  chosen_AE, before_AE = rank_by_expert(expert_A, num_experts)
  rank_A = jnp.sum(before_AE * chosen_AE, axis=1, dtype=jnp.int32)
  real_A = jnp.any(chosen_AE > 0, axis=1)
  fits_A = real_A & (rank_A < num_slots)
  row_A = jnp.where(fits_A, expert_A * num_slots + rank_A, num_experts * num_slots)
  order = Permutation(invert(row_A, num_experts * num_slots), row_A.reshape(expert_TK.shape))
  return order, jnp.sum(real_A & ~fits_A, dtype=jnp.int32)
