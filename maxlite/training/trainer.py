"""A program in training, as the loop drives it."""

from maxlite.config.schema import Config
from maxlite.data.batch import to_global
from maxlite.data.train_streams import TrainStreams
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import Metrics, TrainState
from maxlite.training.program import Program


class Trainer:
  """A run's program with its state, which every step replaces."""

  def __init__(self, cfg: Config, program: Program, state: TrainState):
    self.cfg = cfg
    self.program = program
    self.state = state

  def next_batch(self, stream: TrainStreams) -> PyTree:
    """The inputs of the next step, on the next batch of its objective."""
    name = self.program.due(self.state)
    rows = stream.take(name)
    batch = to_global(rows, self.program.batch_sharding, stream.batch_shape(name))
    return self.program.with_extra_inputs(batch)

  def step(self, inputs: PyTree) -> Metrics:
    """Take the step that is due; `state` is the state after it."""
    self.state, metrics = self.program.step(self.state, inputs)
    return metrics

  def close(self) -> None:
    """Close files, after the last step."""


def open_trainer(cfg: Config, program: Program, state: TrainState) -> Trainer:
  """The trainer of a program: a plain one, or of the feature that takes its steps otherwise."""
  trainer_type: type[Trainer] = Trainer
  for feature in program.features:
    trainer_type = feature.trainer_type or trainer_type
  return trainer_type(cfg, program, state)
