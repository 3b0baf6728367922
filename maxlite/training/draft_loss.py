"""The losses of draft heads, entries of the LOSSES table (registry.py)."""

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import DeviceBatch
from maxlite.models.draft import draft_weight, shift_left
from maxlite.sharding import Sharder
from maxlite.training.cross_entropy import cross_entropy_sums, distillation_sums
from maxlite.training.loss import DraftSums, Hidden, Loss, Sums, combine, next_token


def match_head(hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """Divergence of the draft heads from the main head's prediction of the same token."""
  # Draft states are shifted to the position where the main head predicts the same token, so its
  # logits, computed once, serve all draft heads.
  y_BTJD = hidden.drafted_BTJD
  num_heads = y_BTJD.shape[2]
  weight_BTJ = draft_weight(batch.segment_BT, batch.weight_BT, num_heads)
  nll, logits_z, divergence = distillation_sums(
    hidden.x_BTD,
    _shift_right(y_BTJD),
    hidden.w_DV,
    batch,
    _shift_right(weight_BTJ),
    cfg.logits_chunk_tokens,
    sharder,
    hidden.soft_cap,
  )
  draft = DraftSums(jnp.sum(weight_BTJ), divergence)
  return Sums(jnp.sum(batch.weight_BT), nll, logits_z, hidden.layers, draft)


def next_token_and_draft(
  hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder
) -> Sums:
  """Cross-entropy of the main head and of the draft heads against the tokens they predict."""
  y_BTJD = hidden.drafted_BTJD
  num_heads = y_BTJD.shape[2]
  weight_BTJ = draft_weight(batch.segment_BT, batch.weight_BT, num_heads)
  draft_nll, _ = cross_entropy_sums(
    y_BTJD,
    hidden.w_DV,
    shift_left(batch.targets_BT, num_heads),
    weight_BTJ,
    cfg.logits_chunk_tokens,
    sharder,
    hidden.soft_cap,
    one_pass=sharder.platform == "gpu",
  )
  sums = next_token(hidden, batch, cfg, sharder)
  return sums.replace(draft=DraftSums(jnp.sum(weight_BTJ), draft_nll))


def _shift_right(x_BTJ: jax.Array) -> jax.Array:
  """Draft head j's [B, T, ...], 1 + j positions later: the inverse of `shift_left`.

  What passes the end of the row wraps around to its start, where the shifted weights are 0.
  """
  num_heads = x_BTJ.shape[2]
  shifted = [jnp.roll(x_BTJ[:, :, j], 1 + j, axis=1) for j in range(num_heads)]
  return jnp.stack(shifted, axis=2)


def _combine_match(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, dict]:
  """As `combine`, where the draft heads' loss is the total loss."""
  _, parts = combine(sums, cfg, moe)
  draft_loss = _draft_loss(sums)
  return draft_loss, parts | {"draft_loss": draft_loss, "total_loss": draft_loss}


def _combine_joint(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, dict]:
  """As `combine`, with the draft heads' loss added."""
  total, parts = combine(sums, cfg, moe)
  draft_loss = _draft_loss(sums)
  total += cfg.draft_loss_weight * draft_loss
  return total, parts | {"draft_loss": draft_loss, "total_loss": total}


def _draft_loss(sums: Sums) -> jax.Array:
  draft = sums.draft
  assert draft is not None, "a loss without the draft heads' sums"
  return draft.loss / jnp.maximum(draft.weight, 1)


MATCH_HEAD = Loss(match_head, _combine_match, logits=False, drafts=True)
NEXT_TOKEN_AND_DRAFT = Loss(next_token_and_draft, _combine_joint, drafts=True)
