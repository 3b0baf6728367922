"""The base class of features around a training step, and the list of those that a spec uses.

A plain run trains with the step of `step/train_step.py`, has no features and opens none of their
files. A feature is an entry of the table FEATURES (registry.py), which says which specs use it, and
a file in `features/`. `build_program` applies features in the order of the table, the innermost
first.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import optax

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.schema import Config
from maxlite.data.batch import DeviceBatch
from maxlite.metrics.step_row import Row
from maxlite.models import Decoder
from maxlite.optim.labels import Labels
from maxlite.registry import FEATURES
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientFunction
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step
from maxlite.training.loss import DecoderLoss
from maxlite.training.spec import ObjectiveSpec, StepSpec

# (parameters, global batch) -> sums over the batch; see evaluation/held_out.py.
EvalStep = Callable[[PyTree, DeviceBatch], dict[str, PyTree]]


class FeatureRequest(NamedTuple):
  """The arguments from which a feature is built."""

  spec: StepSpec
  sharder: Sharder
  params: PyTree  # The parameters of the model, as ShapeDtypeStructs.
  labels: Mapping[str, Labels]  # By objective, what it trains.
  command: Config | None  # The config of the command, to read other models.


class Feature:
  """A feature around the step of a plain run; the methods here change nothing."""

  # State: what it adds to what a step changes.

  def start(self, state: TrainState) -> TrainState:
    """Return the state before the first step, from the state without this feature."""
    return state

  def shard_state(
    self, shardings: TrainState, state: TrainState, shard: Callable[[PyTree], PyTree]
  ) -> TrainState:
    """Return the sharding of every leaf of the state that `start` returns.

    Args:
      shardings: of every leaf of `state`.
      state: the argument of `start`, as ShapeDtypeStructs.
      shard: gives the shardings of a tree; leaves at a parameter's path are sharded like it.
    """
    del state, shard
    return shardings

  # Inputs: what a step reads besides its batch.

  def inputs(self) -> Mapping[str, PyTree]:
    """Return arrays that every step reads, by name; they are neither donated nor saved.

    The loss finds them as `extra` in `LossFunction.forward`.
    """
    return {}

  def abstract_inputs(self) -> Mapping[str, PyTree]:
    """Return the inputs as ShapeDtypeStructs with shardings, without reading them."""
    return {}

  @property
  def inputs_hash(self) -> str:
    """A hash of the inputs, which a resumed run must have too; empty if there are none."""
    return ""

  # Around: the loss, the gradients and the step.

  def wrap_loss(self, loss: DecoderLoss, objective: ObjectiveSpec) -> DecoderLoss:
    """Return the loss of an objective, from the one without this feature."""
    del objective
    return loss

  def wrap_gradients(self, gradients_of: GradientFunction) -> GradientFunction:
    """Return the function of an objective's gradients, from the one without this feature."""
    return gradients_of

  def wrap_step(self, step: Step, objective: ObjectiveSpec) -> Step:
    """Return the step of an objective, or its update, from the inner one."""
    del objective
    return step

  # Schedule: how steps are compiled and taken, if not one after the other by one program.

  # A subclass of `Program`, for several objectives.
  program_type: type[Any] | None = None
  # A subclass of `Trainer`.
  trainer_type: type[Any] | None = None

  def init_opt_state(
    self, params: PyTree, optimizers: Mapping[str, optax.GradientTransformation]
  ) -> PyTree:
    """Initialize the optimizer states of several objectives."""
    raise NotImplementedError

  # Report: what the run evaluates, counts, prints and draws.

  def build_eval_step(self, model: Decoder) -> EvalStep | None:
    """Build the evaluation step of held-out rows that are not text; None: they are."""
    del model
    return None

  def flops(self, objective: ObjectiveSpec, batch_shape: tuple[int, int]) -> float:
    """Return the FLOPs over all devices that an update on a batch takes besides the model's."""
    del objective, batch_shape
    return 0.0

  def describe(self, cfg: Config) -> list[str]:
    """Return the lines that a run prints before its first step."""
    del cfg
    return []

  def add_to_row(self, row: Row) -> Row:
    """Return further values for the logged row of a step."""
    del row
    return {}

  def draw(self, folder: RunFolder, step: int) -> list[Path]:
    """Draw plots at the end of a run, after `step`; return their files."""
    del folder, step
    return []


FeatureT = TypeVar("FeatureT", bound=Feature)


def build_features(request: FeatureRequest) -> list[Feature]:
  """Build the features that the spec uses, the innermost first."""
  features = []
  for name, entry in FEATURES.entries().items():
    if entry.is_used(request.spec):
      feature = FEATURES[name](request)
      if feature is not None:
        features.append(feature)
  return features


def find_feature(features: Sequence[Feature], kind: type[FeatureT]) -> FeatureT | None:
  """Return the feature of this class, if it is in the list."""
  for feature in features:
    if isinstance(feature, kind):
      return feature
  return None


def abstract_inputs(features: Sequence[Feature]) -> dict[str, jax.ShapeDtypeStruct]:
  """Return what a step reads besides its batch, as ShapeDtypeStructs, by name."""
  extra: dict[str, Any] = {}
  for feature in features:
    extra |= feature.abstract_inputs()
  return extra
