"""Callbacks: code of the user that is called during a run, without changing what is trained."""

import dataclasses
from pathlib import Path

from maxlite.config import Config
from maxlite.metrics.step_row import Row
from maxlite.metrics.writers import Writers
from maxlite.step.train_state import TrainState
from maxlite.training.program import Program


@dataclasses.dataclass(frozen=True)
class CallbackContext:
  """The run that a callback is called in."""

  cfg: Config
  folder: Path
  program: Program
  # The writers of rows; `writers.trackers` also take text and images.
  writers: Writers
  # The first step of this process; after 1 if the run is resumed.
  first_step: int


class Callback:
  """Base class of callbacks; override what is needed. An exception ends the run.

  All processes of a run call every method at the same points; write files only in process 0.
  """

  def on_start(self, context: CallbackContext) -> None:
    """Called before the first step of a process; may raise UserError."""

  def on_row(self, row: Row) -> None:
    """Called with each logged row: `step`, the metrics and, if evaluated, `eval_loss`."""

  def on_checkpoint(self, step: int, state: TrainState) -> None:
    """Called when a checkpoint is being written; the next step donates `state`."""

  def on_end(self, step: int, reason: str) -> None:
    """Called after the last `step`; `reason` is empty if all steps were taken."""
