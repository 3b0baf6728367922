"""So many slots for every expert in every row of the batch; what does not fit is dropped.

Static shapes all through, so the exchange between shards is an ordinary all-to-all, left to XLA.

Source: Lepikhin et al., GShard (2020), algorithm 1, with a batch row for a group.
"""

import math

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.experts import ExpertWeights
from maxlite.layers.moe.permutation import Permutation, invert, permute, permute_weights, unpermute
from maxlite.layers.moe.router import Route
from maxlite.sharding import Sharder

_SLOTS = ("activation_batch_no_exp", "activation_exp", None, None)


def dispatch(
  cfg: MoeConfig,
  sharder: Sharder,
  activation,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, assignments dropped); earlier tokens of a row are served first."""
  num_rows, num_tokens, num_chosen = route.expert_BTK.shape
  even_load = num_tokens * num_chosen / cfg.num_experts
  num_slots = min(math.ceil(cfg.capacity_factor * even_load), num_tokens)
  layout, num_dropped_B = jax.vmap(lambda e: _assign_slots(e, cfg.num_experts, num_slots))(
    route.expert_BTK
  )
  by_expert = lambda x: x.reshape(num_rows, cfg.num_experts, num_slots, -1)
  x_BECD = sharder.constrain(by_expert(jax.vmap(permute)(x_BTD, layout)), _SLOTS)
  weight_BEC1 = by_expert(jax.vmap(permute_weights)(route.weight_BTK, layout)).astype(x_BTD.dtype)
  y_BECD = sharder.constrain(_mlp(x_BECD, weight_BEC1, weights, activation), _SLOTS)
  y_BTD = jax.vmap(unpermute)(y_BECD.reshape(num_rows, -1, x_BTD.shape[-1]), layout)
  return y_BTD, jnp.sum(num_dropped_B, dtype=jnp.int32)


def _assign_slots(expert_TK: jax.Array, num_experts: int, num_slots: int) -> tuple:
  """(Permutation over experts x slots, assignments without a slot) of one row of the batch."""
  expert_A = expert_TK.reshape(-1)
  experts_E = jnp.arange(num_experts, dtype=expert_A.dtype)
  chosen_AE = (expert_A[:, None] == experts_E[None]).astype(jnp.int32)
  before_AE = jnp.cumsum(chosen_AE, axis=0, dtype=jnp.int32) - chosen_AE
  rank_A = jnp.sum(before_AE * chosen_AE, axis=1, dtype=jnp.int32)
  real_A = jnp.any(chosen_AE > 0, axis=1)
  fits_A = real_A & (rank_A < num_slots)
  row_A = jnp.where(fits_A, expert_A * num_slots + rank_A, num_experts * num_slots)
  layout = Permutation(invert(row_A, num_experts * num_slots), row_A.reshape(expert_TK.shape))
  return layout, jnp.sum(real_A & ~fits_A, dtype=jnp.int32)


def _mlp(x_BECD, weight_BEC1, weights: ExpertWeights, activation) -> jax.Array:
  dtype = x_BECD.dtype
  up = [jnp.einsum("becd,edf->becf", x_BECD, w_EDF.astype(dtype)) for w_EDF in weights.wi_EDF]
  if weights.bo_ED is not None:
    up = [h + b[None, :, None].astype(dtype) for h, b in zip(up, weights.bi_EF, strict=True)]
  h_BECF = activation(*up) * weight_BEC1
  y_BECD = jnp.einsum("becf,efd->becd", h_BECF, weights.wo_EFD.astype(dtype))
  if weights.bo_ED is not None:
    y_BECD += weight_BEC1 * weights.bo_ED[None, :, None].astype(dtype)
  return y_BECD
