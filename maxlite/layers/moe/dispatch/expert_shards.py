"""The shard_map and the weight gathering shared by the strategies that run shard by shard."""

import functools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.layers.moe.dispatch import DispatchCounts
from maxlite.layers.moe.experts import (
  BI,
  BO,
  WI,
  WI_A,
  WI_B,
  WO,
  WO_A,
  WO_B,
  ExpertMlp,
  ExpertTree,
  ExpertWeights,
  Factors,
)
from maxlite.layers.moe.router import Route
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import gather_weight, psum, pvary

_GATHERED = "moe_gathered"


class ApplyShard(Protocol):
  """Computes (y_TD of one shard's tokens, this shard's counts)."""

  def __call__(
    self,
    x_TD: jax.Array,
    expert_TK: jax.Array,
    weight_TK: jax.Array,
    weights: ExpertWeights,
  ) -> tuple[jax.Array, DispatchCounts]: ...


def apply_on_shards(
  apply_shard: ApplyShard,
  experts: ExpertMlp,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, DispatchCounts]:
  """(y_BTD, counts over all shards), computed by `apply_shard` on every shard.

  `apply_shard` gets its shard's tokens and the weights of its shard's experts, sharded along the
  hidden axis only, where that does not shard tokens. Its result is summed over that axis.
  """
  sharder = experts.sharder.whole_beside_rows("mlp")
  on_shard: Callable[..., tuple[jax.Array, DispatchCounts]]
  on_shard = functools.partial(_gather_and_apply, apply_shard, sharder)
  if sharder.num_shards("embed_no_exp") > 1:
    # The backward pass gathers the weights again instead of saving them for every layer.
    policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
    on_shard = jax.checkpoint(on_shard, policy=policy, prevent_cse=not sharder.gather_by_permutes)
  rows = sharder.spec((*ROWS, None))
  sharded = jax.shard_map(
    on_shard,
    mesh=sharder.mesh,
    in_specs=(rows, rows, rows, _weight_specs(sharder, weights)),
    out_specs=(rows, jax.P()),
    # Some backends of grouped matmul do not support it.
    check_vma=sharder.check_vma and experts.supports_vma,
  )
  return sharded(x_BTD, route.expert_BTK, route.weight_BTK, weights)


def _gather_and_apply(
  apply_shard: ApplyShard,
  sharder: Sharder,
  x_btD: jax.Array,
  expert_btK: jax.Array,
  weight_btK: jax.Array,
  weights: ExpertWeights,
) -> tuple[jax.Array, DispatchCounts]:
  """(y_btD, counts over all shards), on one shard of the mesh."""
  # Cast before the gather: weight gradients are scattered first, then summed over the other axes.
  x_btD, weight_btK, weights = pvary(x_btD, weight_btK, weights)
  if sharder.num_shards("embed_no_exp") > 1 and not sharder.gather_by_permutes:
    # Also orders the gradients: weight gradients are scattered before the backward pass proceeds.
    x_btD, weights = jax.lax.optimization_barrier((x_btD, weights))
  gathered = _keep_bias_once(_gather(weights, sharder, x_btD.dtype), sharder)
  x_TD = _merge_rows(x_btD)
  expert_TK = _merge_rows(expert_btK)
  weight_TK = _merge_rows(weight_btK)
  y_TD, counts = apply_shard(x_TD, expert_TK, weight_TK, gathered)
  y_btD = psum(y_TD.reshape(x_btD.shape), sharder.mesh_axes("mlp"))
  batch_axes, length_axes = (sharder.mesh_axes(name) for name in ROWS)
  return y_btD, psum(counts, batch_axes + length_axes)


def _merge_rows(x_btD: jax.Array) -> jax.Array:
  """x_TD: the tokens of all rows of a shard along one axis."""
  return x_btD.reshape(-1, x_btD.shape[-1])


def _weight_specs(sharder: Sharder, weights: ExpertWeights) -> ExpertTree[jax.P]:
  """The PartitionSpec of every parameter of the experts."""
  bo_spec = None
  if weights.bo_ED is not None:
    bo_spec = sharder.spec(BO)
  wi_lora = Factors(sharder.spec(WI_A), sharder.spec(WI_B))
  wo_lora = None
  if weights.wo_lora is not None:
    wo_lora = Factors(sharder.spec(WO_A), sharder.spec(WO_B))
  return ExpertTree(
    wi_EDF=(sharder.spec(WI),) * len(weights.wi_EDF),
    wo_EFD=sharder.spec(WO),
    bi_EF=(sharder.spec(BI),) * len(weights.bi_EF),
    bo_ED=bo_spec,
    wi_lora=(wi_lora,) * len(weights.wi_lora),
    wo_lora=wo_lora,
  )


def _gather(weights: ExpertWeights, sharder: Sharder, dtype: jnp.dtype) -> ExpertWeights:
  """The weights of this shard's experts with their whole model axis, in `dtype`'s precision."""
  mesh_axes = sharder.mesh_axes("embed_no_exp")

  def gather(w: jax.Array, axis: int) -> jax.Array:
    gathered = gather_weight(w, dtype, mesh_axes, axis, sharder.gather_by_permutes)
    return checkpoint_name(gathered, _GATHERED)

  wi_EDF = tuple(gather(w_EDF, axis=1) for w_EDF in weights.wi_EDF)
  wo_EFD = gather(weights.wo_EFD, axis=2)
  wi_lora = tuple(factors.replace(a=gather(factors.a, axis=1)) for factors in weights.wi_lora)
  wo_lora = weights.wo_lora
  if wo_lora is not None:
    wo_lora = wo_lora.replace(b=gather(wo_lora.b, axis=2))
  return weights.replace(wi_EDF=wi_EDF, wo_EFD=wo_EFD, wi_lora=wi_lora, wo_lora=wo_lora)


def _keep_bias_once(weights: ExpertWeights, sharder: Sharder) -> ExpertWeights:
  """The output bias on the first shard of the hidden axis only, because outputs are summed."""
  if weights.bo_ED is None:
    return weights
  is_first = jax.lax.axis_index(sharder.mesh_axes("mlp")) == 0
  return weights.replace(bo_ED=jnp.where(is_first, weights.bo_ED, 0))
