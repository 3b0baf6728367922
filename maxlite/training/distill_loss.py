"""The loss `distill`: follow a teacher's predictions besides the text."""

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch
from maxlite.sharding import Sharder
from maxlite.training.cross_entropy import teacher_sums
from maxlite.training.loss import Hidden, Loss, Sums, combine
from maxlite.training.teacher import open_teacher


def distill(hidden: Hidden, batch: Batch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """Cross-entropy against the next token, and divergence from the teacher's prediction of it."""
  student, *teachers = ((h.x_BTD, h.w_DV, h.soft_cap) for h in (hidden, *hidden.teachers))
  nll, logits_z, divergence = teacher_sums(student, teachers, batch, cfg, sharder)
  return Sums(jnp.sum(batch.weight_BT), nll, logits_z, hidden.layers, divergence=divergence)


def _combine_distill(
  sums: Sums, cfg: TrainingConfig, moe: MoeConfig
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """As `combine`, where `distill_alpha` of the next token's loss is replaced by the teacher's.

  The factor T^2 keeps the size of the gradient at any temperature T.

  Source: Hinton et al. (2015), section 2.
  """
  total, parts = combine(sums, cfg, moe)
  distill_loss = cfg.distill_temperature**2 * sums.divergence / jnp.maximum(sums.weight, 1)
  total += cfg.distill_alpha * (distill_loss - parts["loss"])
  return total, parts | {"distill_loss": distill_loss, "total_loss": total}


DISTILL = Loss(distill, _combine_distill, open_teacher=open_teacher)
