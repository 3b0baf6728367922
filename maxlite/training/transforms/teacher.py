"""Distillation: a loss that follows frozen models, which run on the student's mesh in its step."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.checkpoint.checksum import tree_hash
from maxlite.config.schema import MoeConfig, TrainingConfig
from maxlite.data.batch import Batch
from maxlite.metrics.flops import BACKWARD_OVER_FORWARD, train_flops
from maxlite.metrics.waits import report_wait
from maxlite.sharding import Sharder
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step
from maxlite.training.cross_entropy import teacher_sums
from maxlite.training.loss import Hidden, Loss, Sums, combine, run_forward
from maxlite.training.model_folders import teacher_folders
from maxlite.training.model_weights import ModelWeights, open_weights_of
from maxlite.training.trainer import Trainer


@struct.dataclass
class TaughtBatch:
  """The input of a step that has a teacher: not state, so it is neither donated nor saved."""

  batch: Batch
  teacher: Any  # parameters of each of its models


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenModels:
  """Models whose parameters are read on first use."""

  weights: list[ModelWeights]
  trainers: list[Trainer]  # of each model, on the student's mesh

  @functools.cached_property
  def params(self) -> tuple:
    models = zip(self.weights, self.trainers, strict=True)
    with report_wait("reading the teacher"):
      return tuple(weights.read_averages(trainer) for weights, trainer in models)

  @functools.cached_property
  def identity(self) -> str:
    """A hash of all parameters, which does not depend on the mesh."""
    return tree_hash(self.params)

  def flops(self, batch_shape: tuple[int, int]) -> float:
    """FLOPs of the forward pass, by which all parameters' gradients take twice as many."""
    models = [(trainer.cfg.model, trainer.parameter_sizes) for trainer in self.trainers]
    passes = 1 + BACKWARD_OVER_FORWARD
    return sum(train_flops(*model, batch_shape).total for model in models) / passes

  def with_params(self, batch: Any, *, abstract: bool = False) -> TaughtBatch:
    shapes = tuple(trainer.abstract_state.params for trainer in self.trainers)
    return TaughtBatch(batch, shapes if abstract else self.params)

  def with_teacher(self, step: Step) -> Step:
    def taught_step(state: TrainState, taught: TaughtBatch) -> tuple[TrainState, dict]:
      state, metrics = step(state.replace(collections=taught.teacher), taught.batch)
      return state.replace(collections=None), metrics

    return taught_step

  def hidden(self, collections: Any, batch: Batch, sharder: Sharder) -> tuple[Hidden, ...]:
    models = [trainer.model.clone(sharder=sharder) for trainer in self.trainers]
    run = lambda model, params: run_forward(model, params, batch, None, drafts=False)
    return jax.lax.stop_gradient(tuple(map(run, models, collections)))


def open_teacher(student: Trainer) -> FrozenModels:
  """The teacher of `student`. Raises UserError if it cannot be read, or does not fit the mesh."""
  opened = [open_weights_of(folder, student) for folder in teacher_folders(student.cfg)]
  return FrozenModels([weights for weights, _ in opened], [trainer for _, trainer in opened])


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
