"""All tokens to all shards of the expert axis; each shard adds its experts' contributions.

An all-gather and a reduce-scatter instead of the ragged all-to-all: less traffic if tokens have
experts on most shards anyway, and available where the ragged collective is not.
"""

import functools

import jax
import jax.numpy as jnp

from maxlite.layers.moe.dispatch import ragged
from maxlite.layers.moe.dispatch.expert_shards import apply_on_shards
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute
from maxlite.layers.moe.router import Route


def apply_experts(
  mlp: ExpertMlp, x_BTD: jax.Array, route: Route, weights: ExpertWeights
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, 0): nothing is dropped."""
  if mlp.sharder.num_shards("exp") == 1:
    return ragged.apply_experts(mlp, x_BTD, route, weights)  # which does not exchange rows then
  local = functools.partial(_apply_shard, mlp, mlp.sharder.mesh_axes("exp"))
  return apply_on_shards(local, mlp, x_BTD, route, weights)


def _apply_shard(mlp, mesh_axes, x_TD, expert_TK, weight_TK, weights) -> tuple:
  gather = functools.partial(jax.lax.all_gather, axis_name=mesh_axes, tiled=True)
  x_TD, expert_TK, weight_TK = gather(x_TD), gather(expert_TK), gather(weight_TK)
  num_local = weights.wo_EFD.shape[0]
  # Experts of other shards are out of range here, and get no row.
  local_TK = expert_TK - num_local * jax.lax.axis_index(mesh_axes)
  num_rows = expert_TK.shape[0] * min(expert_TK.shape[1], num_local)
  order, group_sizes_e = sort_by_expert(local_TK, num_local, num_rows)
  y_MD = mlp(permute(x_TD, order), permute_weights(weight_TK, order), weights, group_sizes_e)
  y_TD = jax.lax.psum_scatter(unpermute(y_MD, order), mesh_axes, tiled=True)
  return y_TD, jnp.zeros_like(group_sizes_e[0])
