"""Wall time of a run by activity, accumulated over all restarts.

Goodput is the share of time spent in steps that the run kept. The rest is divided into startup,
restart (startup after an interruption, and the time since the checkpoint that was restored),
compilation, waiting for data, evaluation and checkpointing.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from maxlite.metrics.step_row import Row
from maxlite.metrics.waits import Report, report_activities

STEP = "step"
KINDS = {  # and what is printed of long ones
  STEP: "",
  "compile": "compiling the training step",
  "data": "waiting for data",
  "evaluation": "evaluating",
  "checkpoint": "writing a checkpoint",
  "startup": "starting",
  "restart": "restoring",
}
ELAPSED, GOODPUT = "elapsed_seconds", "goodput"


class Stopwatch:
  """Attributes every second to one of KINDS."""

  def __init__(self, kind: str = "startup", clock: Callable[[], float] = time.perf_counter):
    """`kind` is the current activity; `clock` returns seconds."""
    self._seconds = dict.fromkeys(KINDS, 0.0)
    self._kind, self._clock, self._since = kind, clock, clock()

  def resume(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Add the times of the interrupted run that this process continues after `step`.

    `rows` are all logged rows. The time of steps after `step`, and of this process so far, counts
    as `restart`.
    """
    before = _logged_seconds(rows, step)
    if before:
      self.switch("restart")
      self._seconds["restart"] += self._seconds.pop("startup")
      self._seconds = {k: self._seconds.get(k, 0.0) + before[k] for k in KINDS}

  def switch(self, kind: str) -> str:
    """Attribute time to `kind` from now on; return the previous kind."""
    now, before = self._clock(), self._kind
    self._seconds[before] += now - self._since
    self._kind, self._since = kind, now
    return before

  @contextlib.contextmanager
  def during(self, kind: str) -> Iterator[None]:
    before = self.switch(kind)
    try:
      yield
    finally:
      self.switch(before)

  def report_waits(
    self, report: Report, activities: Mapping[str, str] = KINDS
  ) -> contextlib.AbstractContextManager[None]:
    """While open, report what takes more than 5 s, by the texts in `activities`."""
    elapsed = lambda: self._clock() - self._since
    return report_activities(lambda: (activities[self._kind], elapsed()), report)

  def row(self) -> Row:
    """Total `elapsed_seconds`, `goodput`, and the share of each other kind."""
    self.switch(self._kind)
    elapsed = sum(self._seconds.values())
    shares = {_share(kind): self._seconds[kind] / max(elapsed, 1e-9) for kind in KINDS}
    return {ELAPSED: elapsed, **shares}


def _logged_seconds(rows: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
  """Seconds of each kind in logged rows; time after `step` counts as `restart`."""
  timed = [row for row in rows if row.get(ELAPSED)]
  if not timed:
    return {}
  kept = next((row for row in reversed(timed) if row["step"] <= step), {ELAPSED: 0.0})
  seconds = {kind: kept.get(_share(kind), 0.0) * kept[ELAPSED] for kind in KINDS}
  return seconds | {"restart": seconds["restart"] + timed[-1][ELAPSED] - kept[ELAPSED]}


def describe_goodput(row: Mapping[str, Any]) -> str:
  """Format `Stopwatch.row` as one line, largest shares first."""
  others = sorted((kind for kind in KINDS if kind != STEP), key=lambda kind: -row[_share(kind)])
  shares = ", ".join(f"{kind} {row[_share(kind)]:.1%}" for kind in others)
  return f"goodput {row[GOODPUT]:.1%} of {row[ELAPSED]:,.0f} s; {shares}"


def _share(kind: str) -> str:
  return GOODPUT if kind == STEP else f"{kind}_share"
