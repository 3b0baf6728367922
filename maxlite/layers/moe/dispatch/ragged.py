"""Every token's rows to the shards of its experts by a ragged all-to-all, and back.

With one shard of experts there is nothing to exchange, and sorting is all.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch.expert_shards import on_shards
from maxlite.layers.moe.experts import Weights, apply_experts, is_checked
from maxlite.layers.moe.permutation import collect, sort_by_expert, spread, spread_weights
from maxlite.layers.moe.router import Route
from maxlite.sharding import Sharder
from maxlite.sharding.all_to_all import give_back, plan_exchange, send

_ROW_MULTIPLE = 128  # a buffer that is cut short stays whole in the kernels' tiles


def dispatch(
  cfg: MoeConfig, sharder: Sharder, activation, x_BTD: jax.Array, route: Route, weights: Weights
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, assignments dropped)."""
  mlp = functools.partial(apply_experts, activation=activation, cfg=cfg, platform=sharder.platform)
  local = functools.partial(_on_shard, cfg, sharder, mlp)
  return on_shards(local, sharder, x_BTD, route, weights, is_checked(cfg, sharder.platform))


def _on_shard(cfg, sharder, mlp, x_TD, expert_TK, weight_TK, weights) -> tuple:
  layout, counts_E = sort_by_expert(expert_TK, cfg.num_experts, expert_TK.size)
  x_AD, weight_A = spread(x_TD, layout), spread_weights(weight_TK, layout)
  if sharder.num_shards("exp") == 1:
    return collect(mlp(x_AD, weight_A, weights, counts_E), layout), jnp.zeros_like(counts_E[0])
  plan = plan_exchange(
    counts_E,
    sharder.mesh_axes("exp"),
    num_sent=expert_TK.size,
    num_received=buffer_rows(cfg, *expert_TK.shape, sharder.num_shards("exp")),
  )
  plan = jax.tree.map(lambda x: checkpoint_name(x, "moe_route"), plan)
  x_MD = checkpoint_name(send(x_AD, plan), "moe_rows")
  y_MD = mlp(x_MD, send(weight_A, plan), weights, plan.group_sizes_e)
  return collect(give_back(y_MD, plan), layout), plan.num_dropped


def buffer_rows(cfg: MoeConfig, num_tokens: int, num_chosen: int, num_shards: int) -> int:
  """Rows of a shard's receive buffer, for `num_tokens` tokens on each of `num_shards` shards."""
  worst = num_tokens * min(num_chosen, cfg.num_experts // num_shards) * num_shards
  if cfg.ragged_buffer_factor <= 0:
    return worst
  asked = int(cfg.ragged_buffer_factor * num_tokens * num_chosen)
  return min(worst, -(-asked // _ROW_MULTIPLE) * _ROW_MULTIPLE)
