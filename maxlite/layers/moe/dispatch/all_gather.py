"""All tokens to all shards of the expert axis, where each adds its own experts' share.

An all-gather and a reduce-scatter in place of the ragged all-to-all: less to move where a token has
experts on most shards anyway, and possible where the ragged collective is not.
"""

import functools

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch.expert_shards import on_shards
from maxlite.layers.moe.experts import ExpertWeights, apply_experts, is_checked
from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute
from maxlite.layers.moe.router import Route
from maxlite.sharding import Sharder


def dispatch(
  cfg: MoeConfig,
  sharder: Sharder,
  activation,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, 0): nothing is ever dropped."""
  mlp = functools.partial(apply_experts, activation=activation, cfg=cfg, platform=sharder.platform)
  local = functools.partial(_on_shard, sharder.mesh_axes("exp"), mlp)
  return on_shards(local, sharder, x_BTD, route, weights, is_checked(cfg, sharder.platform))


def _on_shard(mesh_axes, mlp, x_TD, expert_TK, weight_TK, weights) -> tuple:
  gather = functools.partial(jax.lax.all_gather, axis_name=mesh_axes, tiled=True)
  x_TD, expert_TK, weight_TK = gather(x_TD), gather(expert_TK), gather(weight_TK)
  num_mine = weights.wo_EFD.shape[0]
  # Experts of other shards are out of range here, and get no row.
  mine_TK = expert_TK - num_mine * jax.lax.axis_index(mesh_axes)
  num_rows = expert_TK.shape[0] * min(expert_TK.shape[1], num_mine)
  layout, group_sizes_e = sort_by_expert(mine_TK, num_mine, num_rows)
  y_MD = mlp(permute(x_TD, layout), permute_weights(weight_TK, layout), weights, group_sizes_e)
  y_TD = jax.lax.psum_scatter(unpermute(y_MD, layout), mesh_axes, tiled=True)
  return y_TD, jnp.zeros_like(group_sizes_e[0])
