"""The lowest held-out loss of a run: which checkpoint is the best, and when to stop early."""

import math
from collections.abc import Iterable

from maxlite.metrics.step_row import LoggedRow

LOSSES = ("eval_ema_loss", "eval_loss")  # of a row; the first that it has counts


class BestLoss:
  """The lowest held-out loss so far; a function of the logged rows, from which a run resumes."""

  def __init__(self, patience: int = 0, rows: Iterable[LoggedRow] = ()):
    """Count `rows`.

    Args:
      patience: evaluations without a lower loss before there is a `stop_reason`; 0: never.
      rows: logged rows, in order of steps.
    """
    self.step = 0
    self.loss = math.inf
    self._patience = patience
    self._evaluations_since = 0
    for row in rows:
      self.add(row)

  def add(self, row: LoggedRow) -> None:
    """Count a row, if it has a held-out loss; None is a loss that was not finite."""
    names = [name for name in LOSSES if name in row]
    if not names:
      return
    loss = row[names[0]]
    if loss is not None and loss < self.loss:
      self.step = int(row["step"])
      self.loss = loss
      self._evaluations_since = 0
    else:
      self._evaluations_since += 1

  @property
  def stop_reason(self) -> str:
    """Why training should stop; empty if it should continue."""
    if not self._patience or self._evaluations_since < self._patience:
      return ""
    return (
      f"early stopping: the held-out loss {self.loss:.4f} of step {self.step} was not lowered in "
      f"{self._evaluations_since} evaluations"
    )
