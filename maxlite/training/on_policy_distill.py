"""On-policy distillation: a student follows teachers on what it has written itself.

Source: Agarwal et al., On-policy distillation of language models (2024), section 3.
"""

import jax.numpy as jnp

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import DeviceBatch
from maxlite.sharding import Sharder
from maxlite.step.train_state import Metrics
from maxlite.training.cross_entropy import PredictionHead, Unembedding, divergence_sums
from maxlite.training.loss import Hidden, Loss, Sums, add_auxiliary_losses
from maxlite.training.policy_loss import PolicyBatch


def on_policy_sums(
  hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder
) -> Sums:
  """The divergence from the teachers' distributions at the student's own tokens."""
  student, *teachers = [
    PredictionHead(each.x_BTD, Unembedding(each.w_DV, each.soft_cap))
    for each in (hidden, *hidden.teachers)
  ]
  nll, logits_z, divergence = divergence_sums(student, teachers, batch, cfg, sharder)
  return Sums(
    weight=jnp.sum(batch.weight_BT),
    nll=nll,
    logits_z=logits_z,
    layers=hidden.layers,
    divergence=divergence,
  )


def _combine(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jnp.ndarray, Metrics]:
  """(mean divergence of the student's tokens with auxiliary losses, the parts by name)."""
  assert sums.divergence is not None, "a loss without teachers"
  num_tokens = jnp.maximum(sums.weight, 1).astype(sums.divergence.dtype)
  total, parts = add_auxiliary_losses(sums.divergence / num_tokens, sums, cfg, moe)
  return total, parts | {"sampled_entropy": sums.nll / num_tokens}


# An entry of ROLLOUT_LOSSES and of TAUGHT_LOSSES.
ON_POLICY_DISTILL = Loss(on_policy_sums, _combine, batch=PolicyBatch)
