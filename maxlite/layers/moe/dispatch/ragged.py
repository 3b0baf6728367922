"""Tokens to the shards of their experts by a ragged all-to-all, and back.

With one shard of experts, sorting is sufficient.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch import Dispatch, DispatchCounts
from maxlite.layers.moe.dispatch.expert_shards import apply_on_shards
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute
from maxlite.layers.moe.receive_buffer import (
  BUFFER_FACTORS,
  choose_buffer,
  overfull_by_factor,
  worst_case_rows,
)
from maxlite.layers.moe.router import Route
from maxlite.sharding import all_to_all


def _is_selected(cfg: MoeConfig) -> bool:
  return cfg.sparse_matmul and not cfg.use_ring_of_experts


def apply_experts(
  experts: ExpertMlp,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, DispatchCounts]:
  """(y_BTD, counts)"""
  apply_shard = functools.partial(_apply_shard, experts)
  return apply_on_shards(apply_shard, experts, x_BTD, route, weights)


def _apply_shard(
  experts: ExpertMlp,
  x_TD: jax.Array,
  expert_TK: jax.Array,
  weight_TK: jax.Array,
  weights: ExpertWeights,
) -> tuple[jax.Array, DispatchCounts]:
  """(y_TD of this shard's tokens, counts)"""
  order, counts_E = sort_by_expert(expert_TK, experts.cfg.num_experts, expert_TK.size)
  weight_A = permute_weights(weight_TK, order)
  if experts.sharder.num_shards("exp") == 1:
    with jax.named_scope("dispatch"):
      x_AD = permute(x_TD, order)
    with jax.named_scope("experts"):
      y_AD = experts(x_AD, weight_A, weights, counts_E)
    with jax.named_scope("combine"):
      return unpermute(y_AD, order), _no_counts(experts, counts_E)
  num_tokens, width = x_TD.shape
  x_T = x_TD.reshape((num_tokens, *all_to_all.row_shape(width)))
  num_assignments = expert_TK.size  # also the number of rows of an even load
  num_chosen = expert_TK.shape[1]
  num_shards = experts.sharder.num_shards("exp")
  worst_case = worst_case_rows(experts.cfg, num_tokens, num_chosen, num_shards)
  with jax.named_scope("dispatch"):
    plan = _plan_exchange(experts, counts_E, num_assignments, worst_case)
    x_M = checkpoint_name(all_to_all.dispatch(permute(x_T, order), plan), "moe_rows")
    weight_M = all_to_all.dispatch(weight_A, plan)
  with jax.named_scope("experts"):
    y_M = experts(x_M, weight_M, weights, plan.group_sizes_e, worst_case)
  with jax.named_scope("combine"):
    y_T = unpermute(all_to_all.combine(y_M, plan), order)
  return y_T.reshape(x_TD.shape), _count(experts, plan, num_assignments, worst_case)


def _plan_exchange(
  experts: ExpertMlp,
  counts_E: jax.Array,
  num_assignments: int,
  worst_case: int,
) -> all_to_all.DispatchPlan:
  """The plan of the ragged all-to-all, by this shard's number of assignments to each expert."""
  buffer = choose_buffer(experts.cfg, num_assignments, worst_case)
  plan = all_to_all.plan_dispatch(
    counts_E,
    experts.sharder.mesh_axes("exp"),
    num_sent=num_assignments,
    num_received=buffer.num_rows,
    limit=buffer.limit,
    may_drop=experts.cfg.drops_overflow,
  )
  return jax.tree.map(lambda x: checkpoint_name(x, "moe_route"), plan)


def _no_counts(experts: ExpertMlp, counts_E: jax.Array) -> DispatchCounts:
  """The counts of a shard that has all experts, and receives no rows."""
  overfull_F = None
  if experts.cfg.has_bounded_buffer:
    overfull_F = jnp.zeros_like(counts_E, shape=BUFFER_FACTORS.shape)
  return DispatchCounts(jnp.zeros_like(counts_E[0]), overfull_F)


def _count(
  experts: ExpertMlp,
  plan: all_to_all.DispatchPlan,
  even_load: int,
  worst_case: int,
) -> DispatchCounts:
  """The counts of this shard: as a sender those dropped, as a receiver the rows it needs."""
  overfull_F = None
  if experts.cfg.has_bounded_buffer:
    overfull_F = overfull_by_factor(plan.num_needed, even_load, worst_case)
  return DispatchCounts(plan.num_dropped, overfull_F)


DISPATCH = Dispatch(apply_experts, _is_selected, collective="ragged-all-to-all")
