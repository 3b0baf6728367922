"""Tokens to the shards of their experts by a ragged all-to-all, and back.

With one shard of experts, sorting is sufficient.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch import Dispatch
from maxlite.layers.moe.dispatch.expert_shards import apply_on_shards
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute
from maxlite.layers.moe.router import Route
from maxlite.sharding import all_to_all

_ROW_MULTIPLE = 128  # A bounded buffer is a whole number of the kernels' row tiles.


def _is_selected(cfg: MoeConfig) -> bool:
  return cfg.sparse_matmul and not cfg.use_ring_of_experts


def apply_experts(
  experts: ExpertMlp,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, number of assignments dropped)"""
  apply_shard = functools.partial(_apply_shard, experts)
  return apply_on_shards(apply_shard, experts, x_BTD, route, weights)


def _apply_shard(
  experts: ExpertMlp,
  x_TD: jax.Array,
  expert_TK: jax.Array,
  weight_TK: jax.Array,
  weights: ExpertWeights,
) -> tuple[jax.Array, jax.Array]:
  """(y_TD of this shard's tokens, number of their assignments dropped)"""
  order, counts_E = sort_by_expert(expert_TK, experts.cfg.num_experts, expert_TK.size)
  weight_A = permute_weights(weight_TK, order)
  if experts.sharder.num_shards("exp") == 1:
    x_AD = permute(x_TD, order)
    y_AD = experts(x_AD, weight_A, weights, counts_E)
    return unpermute(y_AD, order), jnp.zeros_like(counts_E[0])
  num_tokens, width = x_TD.shape
  x_T = x_TD.reshape((num_tokens, *all_to_all.row_shape(width)))
  plan = _plan_exchange(experts, counts_E, expert_TK)
  x_M = checkpoint_name(all_to_all.dispatch(permute(x_T, order), plan), "moe_rows")
  weight_M = all_to_all.dispatch(weight_A, plan)
  y_M = experts(x_M, weight_M, weights, plan.group_sizes_e)
  y_T = unpermute(all_to_all.combine(y_M, plan), order)
  return y_T.reshape(x_TD.shape), plan.num_dropped


def _plan_exchange(
  experts: ExpertMlp,
  counts_E: jax.Array,
  expert_TK: jax.Array,
) -> all_to_all.DispatchPlan:
  """The plan of the ragged all-to-all, by this shard's number of assignments to each expert."""
  cfg = experts.cfg
  num_tokens, num_chosen = expert_TK.shape
  num_received = buffer_rows(cfg, num_tokens, num_chosen, experts.sharder.num_shards("exp"))
  plan = all_to_all.plan_dispatch(
    counts_E,
    experts.sharder.mesh_axes("exp"),
    num_sent=expert_TK.size,
    num_received=num_received,
    may_drop=cfg.ragged_buffer_factor > 0,
  )
  return jax.tree.map(lambda x: checkpoint_name(x, "moe_route"), plan)


def buffer_rows(cfg: MoeConfig, num_tokens: int, num_chosen: int, num_shards: int) -> int:
  """Rows of a shard's receive buffer, for `num_tokens` tokens on each of `num_shards` shards."""
  num_local = cfg.num_experts // num_shards
  worst_case = num_tokens * min(num_chosen, num_local) * num_shards
  if cfg.ragged_buffer_factor <= 0:
    return worst_case
  num_rows = int(cfg.ragged_buffer_factor * num_tokens * num_chosen)
  num_tiles = -(-num_rows // _ROW_MULTIPLE)  # rounded up
  return min(worst_case, num_tiles * _ROW_MULTIPLE)


DISPATCH = Dispatch(apply_experts, _is_selected, collective="ragged-all-to-all")
