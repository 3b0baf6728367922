"""Models beside the trained one: frozen, read from folders, and inputs of every step.

They run on the mesh of the trained model, in its step.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import Mesh

from maxlite.checkpoint.checksum import tree_hash
from maxlite.config.schema import Config
from maxlite.data.batch import DeviceBatch
from maxlite.metrics.flops import BACKWARD_OVER_FORWARD, train_flops
from maxlite.metrics.waits import report_wait
from maxlite.models import Decoder
from maxlite.sharding.pytree import PyTree
from maxlite.training.feature import Feature
from maxlite.training.loss import DecoderLoss, Hidden, run_forward
from maxlite.training.model_folders import ModelFolder
from maxlite.training.model_weights import ModelWeights, open_weights_of
from maxlite.training.program import Program, build_program, parameter_sizes


@dataclasses.dataclass(frozen=True, eq=False)
class FrozenModel:
  """A model whose predictions a loss reads."""

  weights: ModelWeights
  stored: Program  # Of this model as it is stored, on the mesh and batches of the trained one.
  program: Program  # The same, whose weights have 16 bits if those of the trained model do.


class FrozenModels(Feature):
  """The frozen models of a run, whose parameters are read on first use."""

  def __init__(
    self, name: str, cfg: Config, mesh: Mesh, find: Callable[[Config], Sequence[ModelFolder]]
  ):
    """
    Args:
      name: of the models' parameters among the inputs of a step, a tuple with a tree for each.
      cfg: the config of the run.
      mesh: the mesh of the run, over which they are sharded.
      find: returns the folder of each model. Generation of text, for example, needs none of them,
        so that a run can be opened where they are not.
    """
    self._name = name
    self._cfg = cfg
    self._mesh = mesh
    self._find = find

  @functools.cached_property
  def models(self) -> list[FrozenModel]:
    """The models. Raises UserError if one cannot be read, or does not fit the mesh."""
    models = []
    devices = list(self._mesh.devices.flat)
    for folder in self._find(self._cfg):
      weights, stored = open_weights_of(folder, self._cfg, devices)
      program = stored
      # float32 holds the values of bfloat16, so that the smaller type of the two is kept.
      is_rounded = self._cfg.model.weight_dtype == "bfloat16"
      if is_rounded and stored.spec.model.weight_dtype != "bfloat16":
        model = dataclasses.replace(stored.spec.model, weight_dtype="bfloat16")
        program = build_program(dataclasses.replace(stored.spec, model=model), devices)
      models.append(FrozenModel(weights, stored, program))
    return models

  @functools.cached_property
  def params(self) -> tuple[PyTree, ...]:
    """The parameters of every model: their moving averages if it has them."""
    models = self.models
    with report_wait(f"reading the {self._name}"):
      return tuple(map(_read, models))

  def inputs(self) -> Mapping[str, PyTree]:
    return {self._name: self.params}

  def abstract_inputs(self) -> Mapping[str, PyTree]:
    return {self._name: tuple(model.program.abstract_state.params for model in self.models)}

  @functools.cached_property
  def inputs_hash(self) -> str:
    """A hash of all parameters, which does not depend on the mesh."""
    return tree_hash(self.params)

  def forward_flops(self, batch_shape: tuple[int, int]) -> float:
    """FLOPs of the forward passes; `train_flops` also counts a backward pass of all parameters."""
    total = 0.0
    for model in self.models:
      sizes = parameter_sizes(model.program)
      total += train_flops(model.program.spec.model, sizes, batch_shape).total
    return total / (1 + BACKWARD_OVER_FORWARD)


def _read(model: FrozenModel) -> PyTree:
  """The parameters of a model, or their moving averages, in the types of its program."""

  def typed(leaf: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    return leaf.astype(like.dtype)

  params = model.weights.read_averages(model.stored)
  return jax.tree.map(typed, params, model.program.abstract_state.params)


@dataclasses.dataclass(frozen=True)
class FollowingLoss(DecoderLoss):
  """A loss of a decoder that reads the predictions of frozen models, without jitter."""

  others: tuple[Decoder, ...]
  # (parameters of the decoder, the step's inputs beside the batch) -> those of each model.
  params_of: Callable[[PyTree, Mapping[str, PyTree]], tuple[PyTree, ...]]

  def hidden(
    self,
    params: PyTree,
    batch: DeviceBatch,
    key: jax.Array | None,
    extra: Mapping[str, PyTree],
  ) -> Hidden:
    own = super().hidden(params, batch, key, extra)
    results = []
    for other, other_params in zip(self.others, self.params_of(params, extra), strict=True):
      # The decoder's sharder, which may be that of the inside of a shard_map.
      model = other.clone(sharder=self.model.sharder)
      result = run_forward(model, other_params, batch, None, drafts=False)
      results.append(jax.lax.stop_gradient(result))
    return own.replace(teachers=tuple(results))
