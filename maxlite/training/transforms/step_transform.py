"""The base class of transforms of the training step, and the list of those that a config uses.

A plain run trains with the step of `step/train_step.py` and has no transforms. A feature beside it
is a transform: an entry of STEP_TRANSFORMS (registry.py), built from the config, in a file
of this folder. The trainer applies all transforms alike, in the order of the table, of which the
first is the innermost.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from jax.sharding import Mesh

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.schema import Config
from maxlite.data.batch import DeviceBatch
from maxlite.metrics.step_row import Row
from maxlite.models import Decoder
from maxlite.registry import STEP_TRANSFORMS
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientFunction
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step
from maxlite.training.loss import DecoderLoss
from maxlite.training.objective import Objective
from maxlite.training.objective_plan import ObjectivePlan, StepPrograms

# (parameters, global batch) -> sums over the batch; see evaluation/held_out.py.
EvalStep = Callable[[PyTree, DeviceBatch], dict[str, PyTree]]


class TransformRequest(NamedTuple):
  """The arguments from which a transform is built."""

  cfg: Config
  mesh: Mesh
  params: PyTree  # The parameters of the model, as ShapeDtypeStructs.


class StepTransform:
  """A feature beside the step of a plain run; the methods here change nothing."""

  # What it adds to the state.

  def start(self, state: TrainState) -> TrainState:
    """The state before the first step, from the state without this transform."""
    return state

  def names(self, names: TrainState, state: TrainState, parameter_names: PyTree) -> TrainState:
    """The logical axis names of every leaf of the state that `start` returns.

    Args:
      names: the names of every leaf of `state`.
      state: the argument of `start`, as ShapeDtypeStructs.
      parameter_names: the logical axis names of the parameters.
    """
    del state, parameter_names
    return names

  def place(self, state: TrainState) -> TrainState:
    """The state as ShapeDtypeStructs, with other shardings or memories than those given."""
    return state

  # What it adds to the inputs of a step.

  def inputs(self) -> Mapping[str, PyTree]:
    """Arrays that every step reads beside its batch, by name; they are neither donated nor saved.

    The loss finds them as `extra` in `LossFunction.forward`.
    """
    return {}

  def abstract_inputs(self) -> Mapping[str, PyTree]:
    """The inputs as ShapeDtypeStructs with shardings, without reading them."""
    return {}

  @property
  def inputs_hash(self) -> str:
    """A hash of the inputs, which a resumed run must have too; empty if there are none."""
    return ""

  # What it does around the step.

  def shard(self, sharder: Sharder) -> Sharder:
    """The sharder of the run, from the one without this transform."""
    return sharder

  def objective_plan(self) -> ObjectivePlan | None:
    """The plan of several objectives, if the run does not train the one of its config."""
    return None

  def wrap_loss(self, loss: DecoderLoss, objective: Objective) -> DecoderLoss:
    """The loss of an objective, from the one without this transform."""
    del objective
    return loss

  def wrap_gradients(self, gradients_of: GradientFunction) -> GradientFunction:
    """The function of an objective's gradients, from the one without this transform."""
    return gradients_of

  def wrap_step(self, step: Step, index: int) -> Step:
    """The step, or its update, of the objective with this index, from the inner one."""
    del index
    return step

  def wrap_programs(
    self, programs: StepPrograms, build: "Callable[[StepTransform], StepPrograms]"
  ) -> StepPrograms:
    """The compiled steps of a run, from those without this method.

    Args:
      build: builds the compiled steps with another transform in the place of this one.
    """
    del build
    return programs

  # What it adds to evaluation.

  def build_eval_step(self, model: Decoder) -> EvalStep | None:
    """The evaluation step of the run's held-out rows, if they are not text; see `EvalStep`."""
    del model
    return None

  # What the run reports.

  def flops(self, objective: Objective, batch_shape: tuple[int, int]) -> float:
    """The FLOPs over all devices that one update on one batch takes beside the model's."""
    del objective, batch_shape
    return 0.0

  def describe(self) -> list[str]:
    """The lines that a run prints before its first step."""
    return []

  def add_to_row(self, row: Row) -> Row:
    """Further values for the logged row of a step."""
    del row
    return {}

  def draw(self, folder: RunFolder, step: int) -> list[Path]:
    """Draw plots at the end of a run, after `step`; returns their files."""
    del folder, step
    return []


TransformT = TypeVar("TransformT", bound=StepTransform)


def build_transforms(request: TransformRequest) -> list[StepTransform]:
  """The transforms that the config uses, the innermost first."""
  transforms = []
  for name in STEP_TRANSFORMS:
    build = STEP_TRANSFORMS[name]
    transform = build(request)
    if transform is not None:
      transforms.append(transform)
  return transforms


def find_transform(
  transforms: Sequence[StepTransform], kind: type[TransformT]
) -> TransformT | None:
  """The transform of this class, if it is in the list."""
  for transform in transforms:
    if isinstance(transform, kind):
      return transform
  return None
