"""The evaluation step: sums over the tokens of a held-out batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlite.config.schema import TrainingConfig
from maxlite.data.batch import Batch
from maxlite.models.decoder import Decoder
from maxlite.training.draft_acceptance import acceptance_sums
from maxlite.training.loss import next_token, run_forward


def build_eval_step(
  model: Decoder, cfg: TrainingConfig, num_bytes_V: jax.Array
) -> Callable[[Any, Batch], dict]:
  """Build step(params, batch) -> sums of `nll` [nats], `weight` and `num_bytes` of the targets.

  A model with draft heads also returns `draft`, the sums of training/draft_acceptance.py.
  """
  has_drafts = model.cfg.num_draft_heads > 0

  def eval_step(params: Any, batch: Batch) -> dict:
    hidden = run_forward(model, params, batch, jitter_key=None, drafts=has_drafts)
    sums = next_token(hidden, batch, cfg, model.sharder)
    num_bytes_BT = jnp.take(num_bytes_V, batch.targets_BT, mode="clip").astype(jnp.float32)
    num_bytes = jnp.sum(num_bytes_BT, where=batch.weight_BT > 0)
    counts = {"nll": sums.nll, "weight": sums.weight, "num_bytes": num_bytes}
    if has_drafts:
      counts["draft"] = acceptance_sums(hidden, batch, cfg.logits_chunk_tokens, model.sharder)
    return counts

  return eval_step
