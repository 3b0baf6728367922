"""All tokens to all shards of the expert axis; each shard adds its experts' contributions.

An all-gather and a reduce-scatter instead of the ragged all-to-all: less traffic if tokens have
experts on most shards anyway, and available where the ragged collective is not.
"""

import functools

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch import Dispatch, DispatchCounts, ragged
from maxlite.layers.moe.dispatch.expert_shards import apply_on_shards
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute
from maxlite.layers.moe.router import Route


def _is_selected(cfg: MoeConfig) -> bool:
  return cfg.sparse_matmul and cfg.use_ring_of_experts


def apply_experts(
  experts: ExpertMlp,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, DispatchCounts]:
  """(y_BTD, 0): nothing is dropped."""
  if experts.sharder.num_shards("exp") == 1:
    # With one shard of experts, the ragged dispatch exchanges no rows.
    return ragged.apply_experts(experts, x_BTD, route, weights)
  apply_shard = functools.partial(_apply_shard, experts)
  return apply_on_shards(apply_shard, experts, x_BTD, route, weights)


def _apply_shard(
  experts: ExpertMlp,
  x_TD: jax.Array,
  expert_TK: jax.Array,
  weight_TK: jax.Array,
  weights: ExpertWeights,
) -> tuple[jax.Array, DispatchCounts]:
  """(y_TD of this shard's tokens, 0), by this shard's experts on the tokens of all shards."""
  mesh_axes = experts.sharder.mesh_axes("exp")
  gather = functools.partial(jax.lax.all_gather, axis_name=mesh_axes, tiled=True)
  with jax.named_scope("dispatch"):
    x_TD = gather(x_TD)
    expert_TK = gather(expert_TK)
    weight_TK = gather(weight_TK)
    num_tokens, num_chosen = expert_TK.shape
    num_local = weights.wo_EFD.shape[0]
    # Experts of other shards are out of range here, and get no row.
    local_TK = expert_TK - num_local * jax.lax.axis_index(mesh_axes)
    num_rows = num_tokens * min(num_chosen, num_local)
    order, group_sizes_e = sort_by_expert(local_TK, num_local, num_rows)
    x_MD = permute(x_TD, order)
    weight_M = permute_weights(weight_TK, order)
  with jax.named_scope("experts"):
    y_MD = experts(x_MD, weight_M, weights, group_sizes_e)
  with jax.named_scope("combine"):
    y_TD = jax.lax.psum_scatter(unpermute(y_MD, order), mesh_axes, tiled=True)
  num_dropped = jnp.zeros_like(group_sizes_e[0])
  return y_TD, DispatchCounts(num_dropped)


DISPATCH = Dispatch(apply_experts, _is_selected, collective="all-gather")
