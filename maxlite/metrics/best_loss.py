"""The lowest held-out loss of a run: which checkpoint is the best, and when to stop early."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

LOSSES = ("eval_ema_loss", "eval_loss")  # of a row; the first that it has counts


class BestLoss:
  """The lowest held-out loss so far; a function of the logged rows, from which a run resumes."""

  def __init__(self, patience: int = 0, rows: Iterable[Mapping[str, Any]] = ()):
    """`patience`: evaluations without a lower loss before `stop_reason`; 0: none."""
    self.step, self.loss = 0, math.inf
    self._patience, self._evaluations_since = patience, 0
    for row in rows:
      self.add(row)

  def add(self, row: Mapping[str, Any]) -> None:
    """Count a row, if it has a held-out loss; None is a loss that was not finite."""
    loss, *_ = [row[name] for name in LOSSES if name in row] or [math.inf]
    self._evaluations_since += any(name in row for name in LOSSES)
    if loss is not None and loss < self.loss:
      self.step, self.loss, self._evaluations_since = int(row["step"]), loss, 0

  @property
  def stop_reason(self) -> str:
    """Why training should stop; empty if it should continue."""
    if not self._patience or self._evaluations_since < self._patience:
      return ""
    return (
      f"early stopping: the held-out loss {self.loss:.4f} of step {self.step} was not lowered in "
      f"{self._evaluations_since} evaluations"
    )
