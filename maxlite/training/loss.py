"""The training loss: sums over tokens, and what is made of them.

A forward pass returns nothing but sums over tokens (`Sums`), which add up over micro-batches and
devices; `combine` makes the loss of their totals. So every loss is the same number on any mesh, any
number of hosts and any number of gradient-accumulation steps.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch
from maxlite.layers.linear import matmul
from maxlite.layers.moe.losses import load_balance_loss, router_z_loss
from maxlite.models.decoder import Decoder
from maxlite.parallel import Sharder
from maxlite.parallel.gather import gather_weight
from maxlite.parallel.vary import vary


@struct.dataclass
class Sums:
  """Sums over the tokens of a batch, float32."""

  weight: jax.Array  # of the loss; 1 per predicted token
  nll: jax.Array  # [nats]
  logits_z: jax.Array  # squared log-partition of the logits
  layers: Any  # what the blocks return, stacked by layer


def cross_entropy_sums(
  x_BTD: jax.Array,
  w_DV: jax.Array,
  targets_BT: jax.Array,
  weight_BT: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
) -> tuple[jax.Array, jax.Array]:
  """(weighted sum of -log p(target) [nats], of the squared log-partition), softmax in float32.

  Every shard goes through its tokens in chunks and recomputes a chunk's logits in the backward
  pass, so no more than `chunk_tokens` x V / (shards of V) logits exist at once. V is cut over the
  mesh axes of `vocab`: partitions meet in one sum per token.
  """
  row_names = ("activation_batch", "activation_length")
  row_axes = tuple(axis for name in row_names for axis in sharder.mesh_axes(name))
  vocab_axes = sharder.mesh_axes("vocab")
  embed_axes = sharder.mesh_axes("embed")
  rows, rows_D = sharder.spec(row_names), sharder.spec((*row_names, None))

  def local(x_btD, w_dv, targets_bt, weight_bt):
    # Also between their gradients: that of w is cut to this shard before the backward pass goes on.
    x_btD, w_dv = jax.lax.optimization_barrier((x_btD, w_dv))
    w_Dv = gather_weight(w_dv, x_btD.dtype, embed_axes, 0)
    x_TD, w_Dv = vary(x_btD.reshape(-1, x_btD.shape[-1]), w_Dv)
    start = jax.lax.axis_index(vocab_axes) * w_Dv.shape[1]
    targets_T = targets_bt.reshape(-1) - start
    sums = _chunked_sums(x_TD, w_Dv, targets_T, weight_bt.reshape(-1), chunk_tokens, vocab_axes)
    return _before_gradients(jax.lax.psum(sums, row_axes))

  return jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(rows_D, sharder.spec(("embed", "vocab")), rows, rows),
    out_specs=(jax.P(), jax.P()),
  )(x_BTD, w_DV, targets_BT, weight_BT)


@jax.custom_vjp
def _before_gradients(sums: Any) -> Any:
  """The sums, made before any gradient is: else XLA may keep all that they are made of for last."""
  return sums


def _forward(sums: Any) -> tuple[Any, Any]:
  return sums, sums


def _backward(sums: Any, cotangents: Any) -> tuple[Any]:
  # A dependence that no compiler sees through, as it does through a barrier.
  return (jax.tree.map(lambda s, ct: jnp.where(jnp.isnan(s), s, ct), sums, cotangents),)


_before_gradients.defvjp(_forward, _backward)


def _chunked_sums(x_TD, w_DV, targets_T, weight_T, chunk_tokens, vocab_axes) -> tuple:
  chunk = lambda args: _chunk_sums(*args, w_DV, vocab_axes)
  num_tokens = x_TD.shape[0]
  num_chunks = math.ceil(num_tokens / chunk_tokens)
  if num_chunks == 1:
    return chunk((x_TD, targets_T, weight_T))
  padding = num_chunks * chunk_tokens - num_tokens
  arrays = [
    jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)).reshape(num_chunks, -1, *a.shape[1:])
    for a in (x_TD, targets_T, weight_T)
  ]
  per_chunk = jax.lax.map(jax.checkpoint(chunk), tuple(arrays))
  return jax.tree.map(jnp.sum, per_chunk)


def _chunk_sums(x_TD, targets_T, weight_T, w_DV, vocab_axes) -> tuple[jax.Array, jax.Array]:
  """Both sums over one chunk; targets count from the first column of this shard's w_DV."""
  accumulator = np.promote_types(x_TD.dtype, jnp.float32)
  logits_TV = matmul(x_TD, w_DV, accumulator)
  top_T = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits_TV, axis=-1)), vocab_axes)
  exp_TV = jnp.exp(logits_TV - top_T[:, None])
  partition_T = top_T + jnp.log(jax.lax.psum(jnp.sum(exp_TV, axis=-1), vocab_axes))
  column_TV = jnp.arange(w_DV.shape[1], dtype=targets_T.dtype)[None]
  is_target_TV = column_TV == targets_T[:, None]
  target_T = jax.lax.psum(jnp.sum(jnp.where(is_target_TV, logits_TV, 0), axis=-1), vocab_axes)
  weight_T = weight_T.astype(accumulator)
  return jnp.sum(weight_T * (partition_T - target_T)), jnp.sum(weight_T * jnp.square(partition_T))


def forward_sums(
  model: Decoder, params: Any, batch: Batch, cfg: TrainingConfig, jitter_key: jax.Array | None
) -> Sums:
  """Sums of one forward pass; `jitter_key` is given in training only."""
  x_BTD, layers, w_DV = model.apply(
    {"params": params},
    batch.tokens_BT,
    batch.segment_BT,
    batch.position_BT,
    method=model.hidden_and_unembedding,
    rngs=None if jitter_key is None else {"jitter": jitter_key},
  )
  nll, logits_z = cross_entropy_sums(
    x_BTD, w_DV, batch.targets_BT, batch.weight_BT, cfg.logits_chunk_tokens, model.sharder
  )
  return Sums(jnp.sum(batch.weight_BT), nll, logits_z, layers)


def combine(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, dict]:
  """(total loss, {name: value} of its parts): a weighted mean over tokens plus auxiliary losses."""
  weight = jnp.maximum(sums.weight, 1)
  parts = {"loss": sums.nll / weight}
  total = parts["loss"]
  if cfg.z_loss_multiplier:
    parts["z_loss"] = sums.logits_z / weight
    total += cfg.z_loss_multiplier * parts["z_loss"]
  if "moe" in sums.layers:
    routers = sums.layers["moe"]
    parts["load_balance_loss"] = load_balance_loss(routers, moe)
    parts["router_z_loss"] = router_z_loss(routers)
    total += moe.load_balance_loss_weight * parts["load_balance_loss"]
    total += moe.router_z_loss_weight * parts["router_z_loss"]
  return total, parts | {"total_loss": total}
