"""Tokens to the shards of their experts by a ragged all-to-all, and back.

With one shard of experts, sorting is sufficient.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch.expert_shards import apply_on_shards
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute
from maxlite.layers.moe.router import Route
from maxlite.sharding import all_to_all

_ROW_MULTIPLE = 128  # a bounded buffer is a whole number of the kernels' row tiles


def apply_experts(
  mlp: ExpertMlp, x_BTD: jax.Array, route: Route, weights: ExpertWeights
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, number of assignments dropped)"""
  return apply_on_shards(functools.partial(_apply_shard, mlp), mlp, x_BTD, route, weights)


def _apply_shard(mlp: ExpertMlp, x_TD, expert_TK, weight_TK, weights) -> tuple:
  cfg, sharder = mlp.cfg, mlp.sharder
  order, counts_E = sort_by_expert(expert_TK, cfg.num_experts, expert_TK.size)
  weight_A = permute_weights(weight_TK, order)
  if sharder.num_shards("exp") == 1:
    y_AD = mlp(permute(x_TD, order), weight_A, weights, counts_E)
    return unpermute(y_AD, order), jnp.zeros_like(counts_E[0])
  x_T = x_TD.reshape(len(x_TD), *all_to_all.row_shape(x_TD.shape[1]))
  plan = all_to_all.plan_dispatch(
    counts_E,
    sharder.mesh_axes("exp"),
    num_sent=expert_TK.size,
    num_received=buffer_rows(cfg, *expert_TK.shape, sharder.num_shards("exp")),
    may_drop=cfg.ragged_buffer_factor > 0,
  )
  plan = jax.tree.map(lambda x: checkpoint_name(x, "moe_route"), plan)
  x_M = checkpoint_name(all_to_all.dispatch(permute(x_T, order), plan), "moe_rows")
  y_M = mlp(x_M, all_to_all.dispatch(weight_A, plan), weights, plan.group_sizes_e)
  return unpermute(all_to_all.combine(y_M, plan), order).reshape(x_TD.shape), plan.num_dropped


def buffer_rows(cfg: MoeConfig, num_tokens: int, num_chosen: int, num_shards: int) -> int:
  """Rows of a shard's receive buffer, for `num_tokens` tokens on each of `num_shards` shards."""
  worst_case = num_tokens * min(num_chosen, cfg.num_experts // num_shards) * num_shards
  if cfg.ragged_buffer_factor <= 0:
    return worst_case
  num_rows = int(cfg.ragged_buffer_factor * num_tokens * num_chosen)
  return min(worst_case, -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE)
