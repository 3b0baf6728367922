"""The training loss: sums over tokens, and what is made of them.

A forward pass returns nothing but sums over tokens (`Sums`), which add up over micro-batches and
devices; `combine` makes the loss of their totals. So every loss is the same number on any mesh, any
number of hosts and any number of gradient-accumulation steps.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch
from maxlite.kernels.numerics import apply_soft_cap
from maxlite.layers.linear import matmul
from maxlite.layers.moe.losses import load_balance_loss, router_z_loss
from maxlite.models.decoder import Decoder
from maxlite.sharding import Sharder
from maxlite.sharding.collectives import gather_weight, pvary


@struct.dataclass
class DraftSums:
  """Sums over the tokens that draft heads predict, float32."""

  weight: jax.Array  # 1 per predicted token and head
  loss: jax.Array  # [nats]


@struct.dataclass
class Sums:
  """Sums over the tokens of a batch, float32."""

  weight: jax.Array  # of the loss; 1 per predicted token
  nll: jax.Array  # [nats]
  logits_z: jax.Array  # squared log-partition of the logits
  layers: Any  # what the blocks return, stacked by layer
  draft: DraftSums | None = None  # of a loss that has draft heads


@struct.dataclass
class Hidden:
  """What a forward pass gives all losses."""

  x_BTD: jax.Array
  layers: Any
  w_DV: jax.Array  # the unembedding
  y_BTJD: jax.Array | None  # of the draft heads
  soft_cap: float = struct.field(pytree_node=False, default=0.0)  # of the logits


class _Head(NamedTuple):
  """What makes logits, on one shard."""

  w_DV: jax.Array
  vocab_axes: tuple[str, ...]
  soft_cap: float


def cross_entropy_sums(
  x: jax.Array,
  w_DV: jax.Array,
  targets: jax.Array,
  weight: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
  soft_cap: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """(weighted sum of -log p(target) [nats], of the squared log-partition), softmax in float32.

  x is [B, T, D], or [B, T, J, D] with as many targets and weights.
  """
  rows = (targets, weight)
  return _token_sums(_cross_entropy, (x,), rows, w_DV, chunk_tokens, sharder, soft_cap)


def match_sums(
  x_BTD: jax.Array,
  y_BTJD: jax.Array,
  w_DV: jax.Array,
  batch: Batch,
  weight_BTJ: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
  soft_cap: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Cross-entropy's two sums, without gradient, and the weighted sum of KL(p || q_j) [nats].

  p is what the model's own head makes of x_BTD at a position, and has no gradient; q_j what it
  makes of y_BTJD there.
  """
  rows = (batch.targets_BT, batch.weight_BT, weight_BTJ)
  states = (x_BTD, y_BTJD)
  return _token_sums(_divergence, states, rows, w_DV, chunk_tokens, sharder, soft_cap)


def _token_sums(
  chunk: Callable[..., tuple],
  states: tuple[jax.Array, ...],
  rows: tuple[jax.Array, ...],
  w_DV: jax.Array,
  chunk_tokens: int,
  sharder: Sharder,
  soft_cap: float,
) -> tuple:
  """Sums of chunk(*states, *rows, head) over all tokens.

  Every shard goes through its tokens in chunks and recomputes a chunk's logits in the backward
  pass, so no more than `chunk_tokens` x V / (shards of V) logits exist at once. V is cut over the
  mesh axes of `vocab`: partitions meet in one sum per token.
  """
  row_names = ("activation_batch", "activation_length")
  row_axes = tuple(axis for name in row_names for axis in sharder.mesh_axes(name))
  vocab_axes = sharder.mesh_axes("vocab")
  embed_axes = sharder.mesh_axes("embed")
  by_row = lambda x: sharder.spec((*row_names, *(None,) * (x.ndim - 2)))
  logits_per_token = sum(math.prod(x.shape[2:-1]) for x in states)
  chunk_length = max(chunk_tokens // logits_per_token, 1)

  def local(states, rows, w_dv):
    # Also between their gradients: that of w is cut to this shard before the backward pass goes on.
    states, w_dv = jax.lax.optimization_barrier((states, w_dv))
    *states, w_Dv = pvary(*states, gather_weight(w_dv, states[0].dtype, embed_axes, 0))
    by_token = [x.reshape(-1, *x.shape[2:]) for x in (*states, *rows)]
    head = _Head(w_Dv, vocab_axes, soft_cap)
    sums = _chunked_sums(lambda args: chunk(*args, head), by_token, chunk_length)
    return _before_gradients(jax.lax.psum(sums, row_axes))

  return jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(*jax.tree.map(by_row, (states, rows)), sharder.spec(("embed", "vocab"))),
    out_specs=jax.P(),
  )(states, rows, w_DV)


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


def _chunked_sums(chunk: Callable, by_token: list[jax.Array], chunk_length: int) -> tuple:
  num_tokens = by_token[0].shape[0]
  num_chunks = math.ceil(num_tokens / chunk_length)
  if num_chunks == 1:
    return chunk(by_token)
  padding = num_chunks * chunk_length - num_tokens
  by_chunk = [
    jnp.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1)).reshape(num_chunks, -1, *a.shape[1:])
    for a in by_token
  ]
  per_chunk = jax.lax.map(jax.checkpoint(chunk), by_chunk)
  return jax.tree.map(jnp.sum, per_chunk)


def _logits(x_TD, head: _Head) -> tuple[jax.Array, jax.Array]:
  """(logits_TV of this shard's columns, log-partition_T over all)."""
  accumulator = np.promote_types(x_TD.dtype, jnp.float32)
  logits_TV = apply_soft_cap(matmul(x_TD, head.w_DV, accumulator), head.soft_cap)
  top_T = jax.lax.pmax(jax.lax.stop_gradient(jnp.max(logits_TV, axis=-1)), head.vocab_axes)
  exp_TV = jnp.exp(logits_TV - top_T[:, None])
  return logits_TV, top_T + jnp.log(jax.lax.psum(jnp.sum(exp_TV, axis=-1), head.vocab_axes))


def _target_sums(logits_TV, partition_T, targets_T, weight_T, vocab_axes) -> tuple:
  """Cross-entropy's two sums."""
  first = jax.lax.axis_index(vocab_axes) * logits_TV.shape[1]
  column_TV = jnp.arange(logits_TV.shape[1], dtype=targets_T.dtype)[None]
  is_target_TV = column_TV == (targets_T - first)[:, None]
  target_T = jax.lax.psum(jnp.sum(jnp.where(is_target_TV, logits_TV, 0), axis=-1), vocab_axes)
  weight_T = weight_T.astype(logits_TV.dtype)
  return jnp.sum(weight_T * (partition_T - target_T)), jnp.sum(weight_T * jnp.square(partition_T))


def _cross_entropy(x, targets, weight, head: _Head) -> tuple[jax.Array, jax.Array]:
  logits_TV, partition_T = _logits(x.reshape(-1, x.shape[-1]), head)
  rows = targets.reshape(-1), weight.reshape(-1)
  return _target_sums(logits_TV, partition_T, *rows, head.vocab_axes)


def _divergence(x_TD, y_TJD, targets_T, weight_T, weight_TJ, head: _Head) -> tuple:
  x_TD, w_DV = jax.lax.stop_gradient((x_TD, head.w_DV))
  own_TV, partition_T = _logits(x_TD, head._replace(w_DV=w_DV))
  own_sums = _target_sums(own_TV, partition_T, targets_T, weight_T, head.vocab_axes)
  log_p_TV = own_TV - partition_T[:, None]
  drafted, partition = _logits(y_TJD.reshape(-1, y_TJD.shape[-1]), head)
  log_q_TJV = (drafted - partition[:, None]).reshape(*y_TJD.shape[:-1], -1)
  excess_TJV = jnp.exp(log_p_TV)[:, None] * (log_p_TV[:, None] - log_q_TJV)
  divergence_TJ = jax.lax.psum(jnp.sum(excess_TJV, axis=-1), head.vocab_axes)
  return *own_sums, jnp.sum(weight_TJ.astype(divergence_TJ.dtype) * divergence_TJ)


def run_forward(
  model: Decoder, params: Any, batch: Batch, jitter_key: jax.Array | None, *, drafts: bool
) -> Hidden:
  """One forward pass, `drafts` with the draft heads; `jitter_key` is given in training only."""
  x_BTD, layers, w_DV = model.apply(
    {"params": params},
    batch.tokens_BT,
    batch.segment_BT,
    batch.position_BT,
    method=model.hidden_and_unembedding,
    rngs=None if jitter_key is None else {"jitter": jitter_key},
  )
  y_BTJD = model.apply({"params": params}, x_BTD, method=model.draft_hidden) if drafts else None
  return Hidden(x_BTD, layers, w_DV, y_BTJD, model.cfg.final_logits_soft_cap)


def next_token(hidden: Hidden, batch: Batch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """Sums of the model's own head against the next token."""
  rows = (batch.targets_BT, batch.weight_BT)
  nll, logits_z = cross_entropy_sums(
    hidden.x_BTD, hidden.w_DV, *rows, cfg.logits_chunk_tokens, sharder, hidden.soft_cap
  )
  return Sums(jnp.sum(batch.weight_BT), nll, logits_z, hidden.layers)


def match_head(hidden: Hidden, batch: Batch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """Sums of the draft heads against what the model's own head makes of the same token."""
  # Draft states are moved to the position whose own state predicts the same token: there the own
  # logits, computed once, serve all heads.
  weight_BTJ = draft_weight(batch, hidden.y_BTJD.shape[2])
  nll, logits_z, loss = match_sums(
    hidden.x_BTD,
    _behind(hidden.y_BTJD),
    hidden.w_DV,
    batch,
    _behind(weight_BTJ),
    cfg.logits_chunk_tokens,
    sharder,
    hidden.soft_cap,
  )
  draft = DraftSums(jnp.sum(weight_BTJ), loss)
  return Sums(jnp.sum(batch.weight_BT), nll, logits_z, hidden.layers, draft)


def next_token_and_draft(
  hidden: Hidden, batch: Batch, cfg: TrainingConfig, sharder: Sharder
) -> Sums:
  """Sums of the model's own head and of the draft heads, all against the tokens they predict."""
  num_heads = hidden.y_BTJD.shape[2]
  weight_BTJ = draft_weight(batch, num_heads)
  targets_BTJ = ahead(batch.targets_BT, num_heads)
  nll, _ = cross_entropy_sums(
    hidden.y_BTJD,
    hidden.w_DV,
    *(targets_BTJ, weight_BTJ),
    cfg.logits_chunk_tokens,
    sharder,
    hidden.soft_cap,
  )
  return next_token(hidden, batch, cfg, sharder).replace(draft=DraftSums(jnp.sum(weight_BTJ), nll))


def ahead(x_BT: jax.Array, num_heads: int) -> jax.Array:
  """x_BTJ: by draft head j, what lies 1 + j positions further on, and 0 past the row's end."""
  moved = (jnp.pad(x_BT[:, n:], ((0, 0), (0, n))) for n in range(1, num_heads + 1))
  return jnp.stack(list(moved), axis=-1)


def draft_weight(batch: Batch, num_heads: int) -> jax.Array:
  """weight_BTJ of what draft head j predicts at each position; 0 past the document's end."""
  same_BTJ = ahead(batch.segment_BT, num_heads) == batch.segment_BT[..., None]
  return jnp.where(same_BTJ, ahead(batch.weight_BT, num_heads), 0)


def _behind(x_BTJ: jax.Array) -> jax.Array:
  """Draft head j's [B, T, ...] moved on by 1 + j positions; what passes the row's end comes first.

  The undoing of `ahead`, whose weights are 0 where a row ends.
  """
  heads = range(x_BTJ.shape[2])
  return jnp.stack([jnp.roll(x_BTJ[:, :, j], 1 + j, axis=1) for j in heads], axis=2)


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


def _combine_match(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, dict]:
  """(the draft heads' loss, which is all that is trained on, the same parts)."""
  _, parts = combine(sums, cfg, moe)
  draft_loss = _draft_loss(sums)
  return draft_loss, parts | {"draft_loss": draft_loss, "total_loss": draft_loss}


def _combine_joint(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, dict]:
  total, parts = combine(sums, cfg, moe)
  draft_loss = _draft_loss(sums)
  total += cfg.draft_loss_weight * draft_loss
  return total, parts | {"draft_loss": draft_loss, "total_loss": total}


def _draft_loss(sums: Sums) -> jax.Array:
  return sums.draft.loss / jnp.maximum(sums.draft.weight, 1)


@dataclasses.dataclass(frozen=True)
class Loss:
  """What a phase is trained on."""

  sums: Callable[[Hidden, Batch, TrainingConfig, Sharder], Sums]
  combine: Callable[[Sums, TrainingConfig, MoeConfig], tuple[jax.Array, dict]]
  drafts: bool = False  # whether it needs the draft heads

  def forward(
    self,
    model: Decoder,
    params: Any,
    batch: Batch,
    cfg: TrainingConfig,
    jitter_key: jax.Array | None,
  ) -> Sums:
    """Sums of one forward pass; `jitter_key` is given in training only."""
    hidden = run_forward(model, params, batch, jitter_key, drafts=self.drafts)
    return self.sums(hidden, batch, cfg, model.sharder)


LOSSES = {
  "next_token": Loss(next_token, combine),
  "match_head": Loss(match_head, _combine_match, drafts=True),
  "next_token_and_draft": Loss(next_token_and_draft, _combine_joint, drafts=True),
}
