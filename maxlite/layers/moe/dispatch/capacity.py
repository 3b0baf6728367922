"""A fixed number of slots per expert and row of the batch; assignments beyond it are dropped.

All shapes are static, so XLA inserts an ordinary all-to-all between shards.

Source: Lepikhin et al., GShard (2020), algorithm 1, with a batch row as a group.
"""

import functools
import math

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch import Dispatch, DispatchCounts
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


def _is_selected(cfg: MoeConfig) -> bool:
  return not cfg.sparse_matmul and cfg.capacity_factor > 0


def apply_experts(
  experts: ExpertMlp,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, DispatchCounts]:
  """(y_BTD, number of assignments dropped); earlier tokens of a row have priority."""
  num_experts = experts.cfg.num_experts
  num_rows, num_tokens, num_chosen = route.expert_BTK.shape
  even_load = num_tokens * num_chosen / num_experts
  # C counts the slots of an expert in the rest of this function.
  num_slots = min(math.ceil(experts.cfg.capacity_factor * even_load), num_tokens)
  by_slot = (num_rows, num_experts, num_slots, -1)

  assign_slots = functools.partial(
    _assign_slots,
    num_experts=num_experts,
    num_slots=num_slots,
  )
  with jax.named_scope("dispatch"):
    order, num_dropped_B = jax.vmap(assign_slots)(route.expert_BTK)
    x_BMD = jax.vmap(permute)(x_BTD, order)
    x_BECD = experts.sharder.constrain(x_BMD.reshape(by_slot), _SLOTS)
    weight_BM = jax.vmap(permute_weights)(route.weight_BTK, order)
    weight_BEC1 = weight_BM.reshape(by_slot).astype(x_BTD.dtype)
  with jax.named_scope("experts"):
    y_BECD = dense_mlp(
      experts,
      x_BECD,
      weight_BEC1[..., 0],
      weights,
      x_axes="becd",
      h_axes="becf",
      y_axes="becd",
    )
    y_BECD = experts.sharder.constrain(y_BECD, _SLOTS)
  with jax.named_scope("combine"):
    y_BMD = y_BECD.reshape(num_rows, -1, x_BTD.shape[-1])
    y_BTD = jax.vmap(unpermute)(y_BMD, order)
  return y_BTD, DispatchCounts(jnp.sum(num_dropped_B, dtype=jnp.int32))


def _assign_slots(
  expert_TK: jax.Array,
  *,
  num_experts: int,
  num_slots: int,
) -> tuple[Permutation, jax.Array]:
  """(Permutation into experts x slots, assignments without a slot) of one row of the batch."""
  expert_A = expert_TK.reshape(-1)
  chosen_AE, before_AE = rank_by_expert(expert_A, num_experts)
  rank_A = jnp.sum(before_AE * chosen_AE, axis=1, dtype=jnp.int32)
  real_A = jnp.any(chosen_AE > 0, axis=1)
  fits_A = real_A & (rank_A < num_slots)
  no_row = num_experts * num_slots
  row_A = jnp.where(fits_A, expert_A * num_slots + rank_A, no_row)
  order = Permutation(
    assignment_M=invert(row_A, no_row),
    row_TK=row_A.reshape(expert_TK.shape),
  )
  num_dropped = jnp.sum(real_A & ~fits_A, dtype=jnp.int32)
  return order, num_dropped


DISPATCH = Dispatch(
  apply_experts,
  _is_selected,
  works_in_shard_map=False,  # XLA ends the process when it partitions the gathers there.
)
