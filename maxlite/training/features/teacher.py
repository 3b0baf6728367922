"""Distillation: a loss that follows frozen models, which run on the student's mesh in its step.

The feature adds the parameters of the frozen models to the inputs of the step, and their forward
pass to the losses of the table TAUGHT_LOSSES.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import DeviceBatch
from maxlite.registry import TAUGHT_LOSSES
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import Metrics
from maxlite.training.cross_entropy import PredictionHead, Unembedding, teacher_sums
from maxlite.training.feature import FeatureRequest
from maxlite.training.features.frozen_models import FollowingLoss, FrozenModels
from maxlite.training.loss import DecoderLoss, Hidden, Loss, Sums, combine
from maxlite.training.model_folders import teacher_folders
from maxlite.training.spec import ObjectiveSpec

TEACHER = "teacher"  # The name of the parameters among the inputs of a step.


class Teacher(FrozenModels):
  """The teachers of a run."""

  def wrap_loss(self, loss: DecoderLoss, objective: ObjectiveSpec) -> DecoderLoss:
    if objective.loss not in TAUGHT_LOSSES:
      return loss
    models = tuple(model.program.model for model in self.models)
    return FollowingLoss(loss.model, loss.loss, loss.cfg, loss.moe, models, _params)

  def flops(self, objective: ObjectiveSpec, batch_shape: tuple[int, int]) -> float:
    if objective.loss not in TAUGHT_LOSSES:
      return 0.0
    return self.forward_flops(batch_shape)


def _params(params: PyTree, extra: Mapping[str, PyTree]) -> tuple[PyTree, ...]:
  del params
  return extra[TEACHER]


def build_teacher(request: FeatureRequest) -> Teacher:
  """The teacher of a run with a loss that follows one; an entry of FEATURES."""
  assert request.command is not None, "a teacher is read by a command"
  return Teacher(TEACHER, request.command, request.sharder.mesh, teacher_folders)


def distill(hidden: Hidden, batch: DeviceBatch, cfg: TrainingConfig, sharder: Sharder) -> Sums:
  """Cross-entropy against the next token, and divergence from the teacher's prediction of it."""
  student = _prediction(hidden)
  teachers = [_prediction(teacher) for teacher in hidden.teachers]
  nll, logits_z, divergence = teacher_sums(student, teachers, batch, cfg, sharder)
  return Sums(
    weight=jnp.sum(batch.weight_BT),
    nll=nll,
    logits_z=logits_z,
    layers=hidden.layers,
    divergence=divergence,
  )


def _prediction(hidden: Hidden) -> PredictionHead:
  return PredictionHead(hidden.x_BTD, Unembedding(hidden.w_DV, hidden.soft_cap))


def _combine_distill(sums: Sums, cfg: TrainingConfig, moe: MoeConfig) -> tuple[jax.Array, Metrics]:
  """As `combine`, where `distill_alpha` of the next token's loss is replaced by the teacher's.

  The factor T^2 keeps the size of the gradient at any temperature T.

  Source: Hinton et al. (2015), section 2.
  """
  total, parts = combine(sums, cfg, moe)
  assert sums.divergence is not None, "a loss without the divergence from a teacher"
  distill_loss = cfg.distill_temperature**2 * sums.divergence / jnp.maximum(sums.weight, 1)
  total += cfg.distill_alpha * (distill_loss - parts["loss"])
  return total, parts | {"distill_loss": distill_loss, "total_loss": total}


DISTILL = Loss(distill, _combine_distill)  # An entry of TAUGHT_LOSSES.
