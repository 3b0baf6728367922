"""What a run evaluates, by the entries of EVALUATIONS: held-out losses, and scores of tasks."""

from collections.abc import Callable

from maxlite.config.schema import Config
from maxlite.data.loader import DataLoader
from maxlite.metrics.step_row import Row
from maxlite.registry import EVALUATIONS
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.training.program import Program

# (parameters, their moving averages or None, step) -> results.
Evaluation = Callable[[PyTree, PyTree, int], Row]


def open_evaluations(cfg: Config, program: Program, data: DataLoader) -> list[Evaluation]:
  """The evaluations of a run. Raises UserError if one cannot be opened."""
  evaluations = []
  for name, entry in EVALUATIONS.entries().items():
    if entry.is_used(cfg):
      evaluation = EVALUATIONS[name](cfg, program, data)
      if evaluation is not None:
        evaluations.append(evaluation)
  return evaluations


def build_evaluation(
  cfg: Config, program: Program, data: DataLoader
) -> Callable[[TrainState], Row] | None:
  """All evaluations of a state in training, one after the other; None without any."""
  evaluations = open_evaluations(cfg, program, data)
  if not evaluations:
    return None

  def evaluate(state: TrainState) -> Row:
    row: Row = {}
    averages = averaged_params(state)
    for evaluation in evaluations:
      row |= evaluation(state.params, averages, int(state.step))
    return row

  return evaluate
