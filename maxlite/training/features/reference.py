"""The frozen reference model of a loss, which runs on the model's mesh in its step.

It is the model of a folder, whose parameters are inputs of the step, or the trained model without
its adapters. The feature adds its forward pass to the losses of the table PREFERENCE_LOSSES, which
it evaluates on held-out pairs, and to losses of rollouts that stay near a reference.
"""

import dataclasses
from collections.abc import Mapping

import jax

from maxlite.config.schema import LoraConfig, ModelConfig
from maxlite.data.batch import DeviceBatch
from maxlite.errors import UserError
from maxlite.layers.lora import ADAPTER, drop_modules
from maxlite.metrics.flops import BACKWARD_OVER_FORWARD, parameter_sizes, train_flops
from maxlite.models import Decoder
from maxlite.optim.labels import Labels, trained_paths
from maxlite.registry import LOSSES, PREFERENCE_LOSSES, has_reference
from maxlite.sharding.pytree import PyTree
from maxlite.training.feature import EvalStep, Feature, FeatureRequest
from maxlite.training.features.frozen_models import FollowingLoss, FrozenModels
from maxlite.training.loss import DecoderLoss
from maxlite.training.model_folders import reference_folders
from maxlite.training.spec import ObjectiveSpec, StepSpec

REFERENCE = "reference"  # The name of the parameters among the inputs of a step.


class Reference(Feature):
  """The reference model of a run."""

  def __init__(self, spec: StepSpec, folder: FrozenModels | None):
    """
    Args:
      folder: the reference model, the only one; None: the trained model without its adapters.
    """
    self._spec = spec
    self._folder = folder

  @property
  def model(self) -> ModelConfig:
    """The config of the reference model."""
    if self._folder is None:
      return dataclasses.replace(self._spec.model, lora=LoraConfig())
    (frozen,) = self._folder.models
    return frozen.program.spec.model

  def inputs(self) -> Mapping[str, PyTree]:
    if self._folder is None:
      return {}
    return self._folder.inputs()

  def abstract_inputs(self) -> Mapping[str, PyTree]:
    if self._folder is None:
      return {}
    return self._folder.abstract_inputs()

  @property
  def inputs_hash(self) -> str:
    if self._folder is None:
      return ""
    return self._folder.inputs_hash

  def wrap_loss(self, loss: DecoderLoss, objective: ObjectiveSpec) -> DecoderLoss:
    if not has_reference(objective.loss, self._spec.training.grpo_beta):
      return loss
    return self.add_reference(loss)

  def add_reference(self, loss: DecoderLoss) -> DecoderLoss:
    """The loss with the reference model."""
    reference = Decoder(self.model, loss.model.sharder)
    return FollowingLoss(loss.model, loss.loss, loss.cfg, loss.moe, (reference,), self._params)

  def _params(self, params: PyTree, extra: Mapping[str, PyTree]) -> tuple[PyTree, ...]:
    """The parameters of the reference, by those of the trained model and the step's inputs."""
    if self._folder is None:
      return (drop_modules(params, ADAPTER),)
    return extra[REFERENCE]

  def build_eval_step(self, model: Decoder) -> EvalStep | None:
    if not self._spec.evaluates_pairs:
      return None
    losses = [each.loss for each in self._spec.objectives]
    name = next(name for name in losses if name in PREFERENCE_LOSSES)
    plain = DecoderLoss(model, LOSSES[name], self._spec.training, self._spec.model.moe)
    loss = self.add_reference(plain)

    @jax.jit
    def sum_pairs(
      params: PyTree, batch: DeviceBatch, extra: Mapping[str, PyTree]
    ) -> dict[str, PyTree]:
      hidden = loss.hidden(params, batch, None, extra)
      sums = loss.loss.sums(hidden, batch, loss.cfg, model.sharder)
      return {"nll": sums.nll, "weight": sums.weight, "pairs": sums.pairs}

    def eval_step(params: PyTree, batch: DeviceBatch) -> dict[str, PyTree]:
      return sum_pairs(params, batch, self.inputs())

    return eval_step

  def flops(self, objective: ObjectiveSpec, batch_shape: tuple[int, int]) -> float:
    if not has_reference(objective.loss, self._spec.training.grpo_beta):
      return 0.0
    return self.forward_flops(batch_shape)

  def forward_flops(self, batch_shape: tuple[int, int]) -> float:
    """FLOPs of a forward pass of the reference model."""
    if self._folder is not None:
      return self._folder.forward_flops(batch_shape)
    total = train_flops(self.model, parameter_sizes(self.model), batch_shape).total
    return total / (1 + BACKWARD_OVER_FORWARD)


def build_reference(request: FeatureRequest) -> Reference:
  """The reference of a run whose loss has one; an entry of FEATURES.

  Raises:
    UserError: the reference is the model without adapters, and a phase trains other parameters.
  """
  spec = request.spec
  if spec.training.reference_path:
    assert request.command is not None, "a reference is read by a command"
    mesh = request.sharder.mesh
    folder = FrozenModels(REFERENCE, request.command, mesh, reference_folders)
    return Reference(spec, folder)
  for objective in spec.objectives:
    if has_reference(objective.loss, spec.training.grpo_beta) and objective.train is not None:
      _require_adapters_only(objective, request.labels[objective.name])
  return Reference(spec, None)


def _require_adapters_only(objective: ObjectiveSpec, labels: Labels) -> None:
  """Raise UserError if a phase trains parameters of the reference, the model without adapters."""
  for path in trained_paths(labels):
    if set(path.split("/")).isdisjoint(ADAPTER):
      raise UserError(
        f"phase {objective.name}: loss={objective.loss} would change its own reference by training "
        f'{path}: write train: [".*lora_.*"], or reference_path=FOLDER of what training starts from'
      )
