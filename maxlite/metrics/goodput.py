"""Where the wall time of a run goes, over all its starts: plain arithmetic.

Goodput is the share that went into steps which the run still has. What else took time is told
apart: starting (of later starts: with all that was lost since the checkpoint they went on from, as
`restart`), compiling, waiting for data, evaluating, saving.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from maxlite.metrics.step_row import Row

STEP = "step"
KINDS = (STEP, "compile", "data", "evaluation", "checkpoint", "startup", "restart")
ELAPSED, GOODPUT = "elapsed_seconds", "goodput"


class Stopwatch:
  """Charges every second to one of KINDS."""

  def __init__(self, kind: str = "startup", clock: Callable[[], float] = time.perf_counter):
    """`kind` is what takes time now; `clock` gives seconds."""
    self._seconds = dict.fromkeys(KINDS, 0.0)
    self._kind, self._clock, self._since = kind, clock, clock()

  def go_on(self, rows: Sequence[Mapping[str, Any]], step: int) -> None:
    """Adds what earlier starts took, of which this one goes on after `step`.

    `rows` are all that was logged, also of steps that are lost. What this start took so far is, as
    they are, the cost of a restart.
    """
    before = _earlier_starts(rows, step)
    if before:
      self.switch("restart")
      self._seconds["restart"] += self._seconds.pop("startup")
      self._seconds = {k: self._seconds.get(k, 0.0) + before[k] for k in KINDS}

  def switch(self, kind: str) -> str:
    """From now on time is charged to `kind`; returns what it was charged to."""
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

  def row(self) -> Row:
    """`elapsed_seconds` of all starts, `goodput`, and each other kind's share of them."""
    self.switch(self._kind)
    elapsed = sum(self._seconds.values())
    shares = {_share(kind): self._seconds[kind] / max(elapsed, 1e-9) for kind in KINDS}
    return {ELAPSED: elapsed, **shares}


def _earlier_starts(rows: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
  """Seconds of each kind in earlier starts; those after `step` are `restart`'s."""
  timed = [row for row in rows if row.get(ELAPSED)]
  if not timed:
    return {}
  kept = next((row for row in reversed(timed) if row["step"] <= step), {ELAPSED: 0.0})
  seconds = {kind: kept.get(_share(kind), 0.0) * kept[ELAPSED] for kind in KINDS}
  return seconds | {"restart": seconds["restart"] + timed[-1][ELAPSED] - kept[ELAPSED]}


def describe(row: Mapping[str, Any]) -> str:
  """One line of what `Stopwatch.row` gives, the largest shares first."""
  others = sorted((kind for kind in KINDS if kind != STEP), key=lambda kind: -row[_share(kind)])
  told = ", ".join(f"{kind} {row[_share(kind)]:.1%}" for kind in others)
  return f"goodput {row[GOODPUT]:.1%} of {row[ELAPSED]:,.0f} s; {told}"


def _share(kind: str) -> str:
  return GOODPUT if kind == STEP else f"{kind}_share"
