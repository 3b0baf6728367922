"""Wall time of a run by activity, accumulated over all restarts.

Goodput is the share of time spent in steps that the run kept. The rest is divided into startup,
restart (startup after an interruption, and the time since the checkpoint that was restored),
compilation, waiting for data, evaluation, checkpointing and callbacks (such as completions).
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from maxlite.metrics.step_row import LoggedRow, Row
from maxlite.metrics.waits import Report, report_activities

STEP = "step"
# Activities, and what is printed of long ones.
KINDS = {
  STEP: "",
  "compile": "compiling the training step",
  "data": "waiting for data",
  "evaluation": "evaluating",
  "checkpoint": "writing a checkpoint",
  "callbacks": "running the callbacks of a checkpoint",
  "startup": "starting",
  "restart": "restoring",
}
# Names in rows: seconds since the start, and the share of them in steps.
ELAPSED = "elapsed_seconds"
GOODPUT = "goodput"


class Stopwatch:
  """Attributes every second to one of KINDS."""

  def __init__(self, kind: str = "startup", clock: Callable[[], float] = time.perf_counter):
    """Start with the activity `kind`; `clock` returns seconds."""
    self._seconds = dict.fromkeys(KINDS, 0.0)
    self._kind = kind
    self._task = ""  # of the activities `startup` and `restart`, and when it began
    self._task_since = 0.0
    self._clock = clock
    self._since = clock()

  def resume(self, rows: Sequence[LoggedRow], step: int) -> None:
    """Add the times of the interrupted run that this process continues after `step`.

    `rows` are all logged rows. The time of steps after `step`, and of this process so far, counts
    as `restart`.
    """
    before = _logged_seconds(rows, step)
    if not before:
      return
    self.switch("restart")
    self._seconds["restart"] += self._seconds["startup"]
    self._seconds["startup"] = 0.0
    for kind in KINDS:
      self._seconds[kind] += before[kind]

  def switch(self, kind: str) -> str:
    """Attribute time to `kind` from now on; return the previous kind."""
    now = self._clock()
    before = self._kind
    self._seconds[before] += now - self._since
    self._kind = kind
    self._since = now
    return before

  def start(self, task: str) -> None:
    """Name what the process does while it starts, for `report_waits`."""
    self._task = task
    self._task_since = self._clock()

  @contextlib.contextmanager
  def during(self, kind: str) -> Iterator[None]:
    """While open, attribute time to `kind`."""
    before = self.switch(kind)
    try:
      yield
    finally:
      self.switch(before)

  def report_waits(
    self, report: Report, activities: Mapping[str, str] = KINDS
  ) -> contextlib.AbstractContextManager[None]:
    """While open, report what takes more than 5 s, by the texts in `activities`."""

    def current() -> tuple[str, float]:
      if self._task and self._kind in ("startup", "restart"):
        return f"{activities[self._kind]}: {self._task}", self._clock() - self._task_since
      return activities[self._kind], self._clock() - self._since

    return report_activities(current, report)

  def row(self) -> Row:
    """Total `elapsed_seconds`, `goodput`, and the share of each other kind."""
    self.switch(self._kind)
    elapsed = sum(self._seconds.values())
    row: Row = {ELAPSED: elapsed}
    for kind, seconds in self._seconds.items():
      row[_share(kind)] = seconds / max(elapsed, 1e-9)
    return row


def _logged_seconds(rows: Sequence[LoggedRow], step: int) -> dict[str, float]:
  """Seconds of each kind in logged rows; empty without rows. Time after `step` is `restart`."""
  timed = [row for row in rows if row.get(ELAPSED)]
  if not timed:
    return {}
  kept: LoggedRow = {ELAPSED: 0.0}
  for row in timed:
    if row["step"] <= step:
      kept = row
  seconds: dict[str, float] = {}
  for kind in KINDS:
    seconds[kind] = (kept.get(_share(kind)) or 0.0) * kept[ELAPSED]
  last = timed[-1]
  seconds["restart"] = seconds["restart"] + last[ELAPSED] - kept[ELAPSED]
  return seconds


def describe_goodput(row: LoggedRow) -> str:
  """Format `Stopwatch.row` as one line, largest shares first, without kinds that took no time."""
  others = [kind for kind in KINDS if kind != STEP and row[_share(kind)] > 0]
  shares: list[str] = []
  for kind in sorted(others, key=lambda kind: -row[_share(kind)]):
    share = row[_share(kind)]
    shares.append(f"{kind} {share:.1%}")
  return f"goodput {row[GOODPUT]:.1%} of {row[ELAPSED]:,.0f} s; {', '.join(shares)}"


def _share(kind: str) -> str:
  """The name of a kind's share in rows."""
  if kind == STEP:
    return GOODPUT
  return f"{kind}_share"
