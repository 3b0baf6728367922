"""The losses of rollouts, entries of ROLLOUT_LOSSES: policy gradients of own completions.

Every segment of a row is a prompt with its completion, whose tokens have a weight. Clipping and
divergence are per token, so that the loss is a sum over tokens or completions, divided by their
number in the whole batch: it does not depend on mesh, micro-batches, packing or padding.

Sources: Shao et al., DeepSeekMath (2024), section 4.1 (GRPO); Liu et al., Understanding
R1-Zero-like training (2025), section 3 (Dr. GRPO); Yu et al., DAPO (2025), section 3; Zheng et al.,
Group sequence policy optimization (2025), section 4.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch, DeviceBatch, Field
from maxlite.sharding import Sharder
from maxlite.step.train_state import Metrics
from maxlite.training.cross_entropy import (
  PolicyLogProbs,
  PredictionHead,
  Unembedding,
  gather_sequences,
  policy_log_probs,
  sequence_sums,
)
from maxlite.training.loss import Hidden, Loss, PolicySums, Sums, add_auxiliary_losses

# In `behaviour_BT`: the policy before this step has written the token.
ON_POLICY = 1.0


class PolicyBatch(Batch[Field]):
  """Rows of prompts and completions; `weight_BT` is 1 where the target is the model's own token.

  There, `advantage_BT` is the advantage of the completion, and `behaviour_BT` the log-probability
  [nats] of the target when it was written, or ON_POLICY.
  """

  float_fields: ClassVar[tuple[str, ...]] = (*Batch.float_fields, "advantage_BT", "behaviour_BT")

  advantage_BT: Field
  behaviour_BT: Field


def policy_sums(hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """The clipped policy gradient of rollouts, and the divergence from a reference.

  The reference, if there is one, is the only one of `hidden.teachers`. Its divergence is estimated
  by r - log r - 1 of the probability ratio r to it, which is unbiased and not negative; weighted by
  the ratio to the policy that wrote the token, its gradient is unbiased too.

  Source: Schulman, Approximating KL divergence (2020); DeepSeek-V3.2 (2025), section 3.1.
  """
  assert isinstance(batch, PolicyBatch), "a batch without advantages"
  policy = _log_probs(hidden, batch, cfg, sharder)
  log_prob_BT = policy.log_prob_BT
  dtype = log_prob_BT.dtype
  weight_BT = batch.weight_BT.astype(dtype)
  advantage_BT = batch.advantage_BT.astype(dtype)
  behaviour_BT = jnp.where(
    batch.behaviour_BT == ON_POLICY,
    jax.lax.stop_gradient(log_prob_BT),
    batch.behaviour_BT.astype(dtype),
  )
  log_ratio_BT = weight_BT * (log_prob_BT - behaviour_BT)
  ratio_BT = jnp.exp(log_ratio_BT)

  max_sequences = weight_BT.shape[1]
  length_BS = jnp.maximum(sequence_sums(weight_BT, batch.segment_BT, max_sequences, sharder), 1)
  followed_BT = ratio_BT
  if cfg.importance_sampling_level == "sequence":
    mean_BS = sequence_sums(log_ratio_BT, batch.segment_BT, max_sequences, sharder) / length_BS
    followed_BT = jnp.exp(gather_sequences(mean_BS, batch.segment_BT, sharder))
  high = cfg.grpo_epsilon if cfg.grpo_epsilon_high < 0 else cfg.grpo_epsilon_high
  gain_BT = followed_BT * advantage_BT
  bounded_BT = jnp.clip(followed_BT, 1 - cfg.grpo_epsilon, 1 + high) * advantage_BT
  loss_BT = -jnp.minimum(gain_BT, bounded_BT)

  reference_kl = jnp.zeros_like(loss_BT, shape=())
  if hidden.teachers:
    (reference_hidden,) = hidden.teachers
    reference = _log_probs(reference_hidden, batch, cfg, sharder)
    kl_BT = _divergence(weight_BT * (reference.log_prob_BT - log_prob_BT))
    reference_kl = jnp.sum(weight_BT * kl_BT)
    if cfg.use_bias_correction_kl:
      kl_BT *= ratio_BT
    loss_BT += cfg.grpo_beta * kl_BT

  if cfg.loss_aggregation == "sequence":
    loss_BS = sequence_sums(weight_BT * loss_BT, batch.segment_BT, max_sequences, sharder)
    loss = jnp.sum(loss_BS / length_BS)
  else:
    loss = jnp.sum(weight_BT * loss_BT)
  sums = PolicySums(
    completions=_num_completions(batch),
    loss=loss,
    clipped=jnp.sum(weight_BT, where=bounded_BT < gain_BT),
    entropy=jnp.sum(weight_BT * policy.entropy_BT),
    behaviour_kl=jnp.sum(weight_BT * _divergence(-log_ratio_BT)),
    reference_kl=reference_kl,
  )
  return Sums(
    weight=jnp.sum(weight_BT),
    nll=-jnp.sum(weight_BT * log_prob_BT),
    logits_z=jnp.sum(weight_BT * policy.logits_z_BT),
    layers=hidden.layers,
    policy=sums,
  )


def _log_probs(
  hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder
) -> PolicyLogProbs:
  head = PredictionHead(hidden.x_BTD, Unembedding(hidden.w_DV, hidden.soft_cap))
  return policy_log_probs(
    head, batch.targets_BT, cfg.rollout_temperature, cfg.logits_chunk_tokens, sharder
  )


def _divergence(log_ratio: jax.Array) -> jax.Array:
  """An unbiased estimate of KL(p || q) [nats] from log q - log p of samples of p."""
  return jnp.expm1(log_ratio) - log_ratio


def _num_completions(batch: DeviceBatch) -> jax.Array:
  return jnp.sum(jnp.max(batch.segment_BT, axis=1)).astype(jnp.float32)


def _count(sums: Sums, batch: DeviceBatch) -> Sums:
  assert sums.policy is not None, "a loss without completions"
  return sums.replace(policy=sums.policy.replace(completions=_num_completions(batch)))


def _combine_policy(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, Metrics]:
  """(the loss with auxiliary losses, the parts by name)."""
  policy = sums.policy
  assert policy is not None, "a loss without completions"
  num_tokens = jnp.maximum(sums.weight, 1)
  divisor = num_tokens
  if cfg.loss_aggregation == "sequence":
    divisor = jnp.maximum(policy.completions, 1)
  elif cfg.loss_aggregation == "constant":
    divisor = jnp.maximum(policy.completions, 1) * cfg.max_completion_length
  loss = policy.loss / divisor.astype(policy.loss.dtype)
  total, parts = add_auxiliary_losses(loss, sums, cfg, moe)
  parts["entropy"] = policy.entropy / num_tokens
  parts["clip_fraction"] = policy.clipped / num_tokens
  parts["approx_kl"] = policy.behaviour_kl / num_tokens
  if cfg.grpo_beta:
    parts["kl"] = policy.reference_kl / num_tokens
  return total, parts


GRPO = Loss(policy_sums, _combine_policy, batch=PolicyBatch, count=_count)
