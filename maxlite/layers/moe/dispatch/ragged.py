"""Every token's rows to the shards of its experts by a ragged all-to-all, and back.

With one shard of experts there is nothing to exchange, and sorting is all.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch.expert_shards import on_shards
from maxlite.layers.moe.experts import ExpertWeights, apply_experts, is_checked
from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute
from maxlite.layers.moe.router import Route
from maxlite.sharding import Sharder, all_to_all

_ROW_MULTIPLE = 128  # a buffer that is cut short stays whole in the kernels' tiles


def dispatch(
  cfg: MoeConfig,
  sharder: Sharder,
  activation,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, assignments dropped)."""
  mlp = functools.partial(apply_experts, activation=activation, cfg=cfg, platform=sharder.platform)
  local = functools.partial(_on_shard, cfg, sharder, mlp)
  return on_shards(local, sharder, x_BTD, route, weights, is_checked(cfg, sharder.platform))


def _on_shard(cfg, sharder, mlp, x_TD, expert_TK, weight_TK, weights) -> tuple:
  layout, counts_E = sort_by_expert(expert_TK, cfg.num_experts, expert_TK.size)
  x_AD, weight_A = permute(x_TD, layout), permute_weights(weight_TK, layout)
  if sharder.num_shards("exp") == 1:
    return unpermute(mlp(x_AD, weight_A, weights, counts_E), layout), jnp.zeros_like(counts_E[0])
  plan = all_to_all.plan_dispatch(
    counts_E,
    sharder.mesh_axes("exp"),
    num_sent=expert_TK.size,
    num_received=buffer_rows(cfg, *expert_TK.shape, sharder.num_shards("exp")),
  )
  plan = jax.tree.map(lambda x: checkpoint_name(x, "moe_route"), plan)
  x_MD = checkpoint_name(all_to_all.dispatch(x_AD, plan), "moe_rows")
  y_MD = mlp(x_MD, all_to_all.dispatch(weight_A, plan), weights, plan.group_sizes_e)
  return unpermute(all_to_all.combine(y_MD, plan), layout), plan.num_dropped


def buffer_rows(cfg: MoeConfig, num_tokens: int, num_chosen: int, num_shards: int) -> int:
  """Rows of a shard's receive buffer, for `num_tokens` tokens on each of `num_shards` shards."""
  worst = num_tokens * min(num_chosen, cfg.num_experts // num_shards) * num_shards
  if cfg.ragged_buffer_factor <= 0:
    return worst
  asked = int(cfg.ragged_buffer_factor * num_tokens * num_chosen)
  return min(worst, -(-asked // _ROW_MULTIPLE) * _ROW_MULTIPLE)
