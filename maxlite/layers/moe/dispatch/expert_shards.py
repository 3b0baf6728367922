"""The shard_map and the weight gathering shared by the strategies that run shard by shard."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.layers.moe.experts import BI, BO, WI, WO, ExpertMlp, ExpertWeights
from maxlite.layers.moe.router import Route
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import gather_weight, psum, pvary

_GATHERED = "moe_gathered"


def apply_on_shards(
  local: Callable[..., tuple[jax.Array, jax.Array]],
  mlp: ExpertMlp,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, number of assignments dropped), computed by `local` on every shard.

  `local(x_TD, expert_TK, weight_TK, weights)` gets its shard's tokens and the weights of its
  shard's experts, sharded along the hidden axis only. Its result is summed over that axis.
  """
  sharder = mlp.sharder
  rows_D = sharder.spec((*ROWS, None))
  is_sharded = sharder.num_shards("embed_no_exp") > 1
  row_axes = tuple(axis for name in ROWS for axis in sharder.mesh_axes(name))

  merge_rows = lambda x_btD: x_btD.reshape(-1, x_btD.shape[-1])

  def on_shard(x_btD, expert_btK, weight_btK, weights):
    if is_sharded:
      # Also orders the gradients: weight gradients are scattered before the backward pass proceeds.
      x_btD, weights = jax.lax.optimization_barrier((x_btD, weights))
    gathered = _gather(weights, sharder, x_btD.dtype)
    x_TD, expert_TK, weight_TK = map(merge_rows, (x_btD, expert_btK, weight_btK))
    x_TD, weight_TK, gathered = pvary(x_TD, weight_TK, gathered)
    gathered = _bias_once(gathered, sharder)
    y_TD, num_dropped = local(x_TD, expert_TK, weight_TK, gathered)
    y_btD = psum(y_TD.reshape(x_btD.shape), sharder.mesh_axes("mlp"))
    return y_btD, psum(num_dropped, row_axes)

  if is_sharded:
    # The backward pass gathers the weights again instead of saving them for every layer.
    policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
    on_shard = jax.checkpoint(on_shard, policy=policy)
  return jax.shard_map(
    on_shard,
    mesh=sharder.mesh,
    in_specs=(rows_D, rows_D, rows_D, ExpertWeights(*map(sharder.spec, (WI, WO, BI, BO)))),
    out_specs=(rows_D, jax.P()),
    check_vma=sharder.check_vma and mlp.supports_vma,  # which kernels in WITHOUT_VMA do not
  )(x_BTD, route.expert_BTK, route.weight_BTK, weights)


def _gather(weights: ExpertWeights, sharder: Sharder, dtype: jnp.dtype) -> ExpertWeights:
  axes = sharder.mesh_axes("embed_no_exp")
  gather = lambda w, axis: checkpoint_name(gather_weight(w, dtype, axes, axis), _GATHERED)
  return weights.replace(
    wi_EDF=tuple(gather(w_EDF, 1) for w_EDF in weights.wi_EDF), wo_EFD=gather(weights.wo_EFD, 2)
  )


def _bias_once(weights: ExpertWeights, sharder: Sharder) -> ExpertWeights:
  """The output bias on the first shard of the hidden axis only, because outputs are summed."""
  if weights.bo_ED is None:
    return weights
  is_first = jax.lax.axis_index(sharder.mesh_axes("mlp")) == 0
  return weights.replace(bo_ED=jnp.where(is_first, weights.bo_ED, 0))
