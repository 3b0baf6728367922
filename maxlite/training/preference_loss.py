"""The losses of pairs of a chosen and a rejected sequence, entries of PREFERENCE_LOSSES.

Segments 2 k - 1 and 2 k of a row are the chosen and the rejected sequence of its k-th pair
(data/packing.py), so a pair is on the devices and in the micro-batch of its row. What it adds to
the loss is not linear in its tokens, but the loss is a sum over pairs.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import DeviceBatch
from maxlite.sharding import Sharder
from maxlite.step.train_state import Metrics
from maxlite.training.cross_entropy import (
  PredictionHead,
  TokenLogProbs,
  Unembedding,
  sequence_sums,
  token_log_probs,
)
from maxlite.training.loss import Hidden, Loss, PairSums, Sums, add_auxiliary_losses


class PairLogProbs(NamedTuple):
  """Log-probabilities [nats] of the answers of each row's pairs; 0 where a row has no pair."""

  chosen_BP: jax.Array
  rejected_BP: jax.Array


def dpo_sums(hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """Direct preference optimization: a logistic loss of how the pair's odds differ from a reference.

  The reward of a sequence is `dpo_beta` times the logarithm of how much likelier it is than by the
  reference, whose result is the only one of `hidden.teachers`.

  Source: Rafailov et al., Direct Preference Optimization (2023), eq. 7; with label smoothing
  Mitchell, A note on DPO with noisy preferences (2023), eq. 3.
  """
  (reference_hidden,) = hidden.teachers
  tokens = _token_log_probs(hidden, batch, cfg, sharder)
  policy = _pair_log_probs(tokens, batch, sharder)
  reference_tokens = _token_log_probs(reference_hidden, batch, cfg, sharder)
  reference = _pair_log_probs(reference_tokens, batch, sharder)
  chosen_BP = cfg.dpo_beta * (policy.chosen_BP - reference.chosen_BP)
  rejected_BP = cfg.dpo_beta * (policy.rejected_BP - reference.rejected_BP)
  margin_BP = chosen_BP - rejected_BP
  smoothing = cfg.dpo_label_smoothing
  loss_BP = -(1 - smoothing) * jax.nn.log_sigmoid(margin_BP)
  loss_BP -= smoothing * jax.nn.log_sigmoid(-margin_BP)
  is_pair_BP = _is_pair(batch, chosen_BP.shape[1])

  def total(x_BP: jax.Array) -> jax.Array:
    return jnp.sum(x_BP, where=is_pair_BP)

  pairs = PairSums(
    pairs=count_pairs(batch),
    loss=total(loss_BP),
    accuracies=total((margin_BP > 0).astype(margin_BP.dtype)),
    rewards_chosen=total(chosen_BP),
    rewards_rejected=total(rejected_BP),
    logps_chosen=total(policy.chosen_BP),
    logps_rejected=total(policy.rejected_BP),
  )
  return Sums(
    weight=jnp.sum(batch.weight_BT),
    nll=-jnp.sum(batch.weight_BT * tokens.log_prob_BT),
    logits_z=jnp.sum(batch.weight_BT * tokens.logits_z_BT),
    layers=hidden.layers,
    pairs=pairs,
  )


def _combine_pairs(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, Metrics]:
  """(mean over pairs plus auxiliary losses, the parts by name)."""
  assert sums.pairs is not None, "a loss without pairs"
  means = pair_means(sums.pairs)
  total, parts = add_auxiliary_losses(means["loss"], sums, cfg, moe)
  return total, means | parts


def pair_means(sums: PairSums) -> Metrics:
  """Means over pairs, by the names that they have in `trl`."""
  num_pairs = jnp.maximum(sums.pairs, 1)
  means = {
    "loss": sums.loss,
    "rewards/chosen": sums.rewards_chosen,
    "rewards/rejected": sums.rewards_rejected,
    "rewards/margins": sums.rewards_chosen - sums.rewards_rejected,
    "rewards/accuracies": sums.accuracies,
    "logps/chosen": sums.logps_chosen,
    "logps/rejected": sums.logps_rejected,
  }
  return {name: total / num_pairs for name, total in means.items()}


def count_pairs(batch: DeviceBatch) -> jax.Array:
  """The number of pairs, float32."""
  return jnp.sum(_num_pairs(batch)).astype(jnp.float32)


def _is_pair(batch: DeviceBatch, max_pairs: int) -> jax.Array:
  """[B, P]: whether a row has at least 1, 2, ... pairs."""
  return jnp.arange(max_pairs)[None] < _num_pairs(batch)[:, None]


def _num_pairs(batch: DeviceBatch) -> jax.Array:
  """num_pairs_B of each row."""
  return jnp.max(batch.segment_BT, axis=1) // 2


def _token_log_probs(
  hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder
) -> TokenLogProbs:
  head = PredictionHead(hidden.x_BTD, Unembedding(hidden.w_DV, hidden.soft_cap))
  return token_log_probs(head, batch.targets_BT, cfg.logits_chunk_tokens, sharder)


def _pair_log_probs(tokens: TokenLogProbs, batch: DeviceBatch, sharder: Sharder) -> PairLogProbs:
  """Sum over the tokens that have a weight: those of the answers."""
  log_prob_BT = batch.weight_BT * tokens.log_prob_BT
  max_pairs = log_prob_BT.shape[1] // 2  # a sequence has at least one position
  log_prob_BS = sequence_sums(log_prob_BT, batch.segment_BT, 2 * max_pairs, sharder)
  return PairLogProbs(chosen_BP=log_prob_BS[:, 0::2], rejected_BP=log_prob_BS[:, 1::2])


def _count(sums: Sums, batch: DeviceBatch) -> Sums:
  assert sums.pairs is not None, "a loss without pairs"
  return sums.replace(pairs=sums.pairs.replace(pairs=count_pairs(batch)))


DPO = Loss(dpo_sums, _combine_pairs, count=_count)
