"""Orders of rows: of one epoch (`config.registry.ROW_ORDERS`), and of a mixture of sources.

The order of a mixture is a pure function of the row's number. Rows are numbered over the whole run,
so the order depends neither on hosts and workers nor on where a run was interrupted. It is a list
of segments with constant shares. A segment ends where a weight changes or a source reaches its
`max_epochs`, and repeats a table of at most SHARE_UNITS rows.
"""

import bisect
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.mixture import MixtureSource

SHARE_UNITS = 10_000  # shares are rounded to multiples of 1 / SHARE_UNITS


def shuffled_order(num_rows: int, seed: int) -> grain.MapDataset[int]:
  """All row indices in random order; when repeated, every epoch has another order."""
  return grain.MapDataset.range(num_rows).seed(seed).shuffle()


class BootstrapOrder(grain.MapDataset[int]):
  """Row indices drawn with replacement; entry n depends on the seed and n alone.

  Source: Efron, Bootstrap methods: another look at the jackknife (1979).
  """

  def __init__(self, num_rows: int, seed: int) -> None:
    super().__init__(grain.MapDataset.range(num_rows))
    self._num_rows, self._seed = num_rows, seed

  def __len__(self) -> int:
    return self._num_rows

  def __getitem__(self, index: int | slice) -> int | grain.MapDataset[int]:
    if isinstance(index, slice):
      return self.slice(index)
    bits = np.random.Philox(key=self._seed, counter=index)
    return int(np.random.Generator(bits).integers(self._num_rows))


@dataclasses.dataclass(frozen=True)
class MixturePart:
  """The training rows of one source."""

  source: MixtureSource
  order: grain.MapDataset[int]  # of its rows, epoch after epoch
  num_rows: int  # of an epoch
  num_tokens: int  # of an epoch
  identity: str  # changes if any row does

  @property
  def max_rows(self) -> float:
    """Rows that the run may read: `max_epochs`, rounded to a whole row."""
    epochs = self.source.max_epochs
    return math.inf if epochs is None else max(round(epochs * self.num_rows), 1)


class Segment:
  """Rows from `first_row` on with constant shares of the sources."""

  def __init__(self, first_row: int, units_S: np.ndarray, used_S: np.ndarray) -> None:
    """
    Args:
      units_S: whole numbers, in proportion to the sources' rows.
      used_S: rows of each source before the segment.
    """
    self.first_row, self.used_S = first_row, used_S
    self.units_S = units_S // np.gcd.reduce(units_S)
    self.source_N = interleave_sources(self.units_S)
    # rank_N[n]: rows of the same source before row n of the table
    self.rank_N = np.zeros(len(self.source_N), np.int64)
    for s in np.flatnonzero(self.units_S):
      self.rank_N[self.source_N == s] = np.arange(self.units_S[s])

  def place(self, row: int) -> tuple[int, int]:
    """(source, index among the rows of this source in the run) of a row of the run."""
    repeats, n = divmod(row - self.first_row, len(self.source_N))
    s = int(self.source_N[n])
    return s, int(self.used_S[s] + repeats * self.units_S[s] + self.rank_N[n])

  def used_before(self, row: int) -> np.ndarray:
    """Rows [S] of each source before a row of the run."""
    repeats, n = divmod(row - self.first_row, len(self.source_N))
    partial_S = np.bincount(self.source_N[:n], minlength=len(self.units_S))
    return self.used_S + repeats * self.units_S + partial_S

  def row_after(self, s: int, count: int) -> int:
    """The row that follows the `count`-th row of source `s` in this segment; `count` > 0."""
    repeats, rank = divmod(count - 1, int(self.units_S[s]))
    n = int(np.flatnonzero(self.source_N == s)[rank])
    return self.first_row + repeats * len(self.source_N) + n + 1


class MixtureOrder(grain.MapDataset[int]):
  """Endless row indices into the concatenated rows of all parts."""

  def __init__(self, parts: Sequence[MixturePart], first_row: Callable[[int], int]) -> None:
    """`first_row` gives the first row of the batch after a number of batches.

    Raises:
      UserError: at some step all sources with a weight have reached their `max_epochs`.
    """
    super().__init__([part.order for part in parts])
    self.parts = parts
    self._offsets = np.cumsum([0, *(part.num_rows for part in parts)]).tolist()
    self._segments = _segments(parts, first_row)
    self._starts = [segment.first_row for segment in self._segments]

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, index: int | slice) -> int | grain.MapDataset[int]:
    if isinstance(index, slice):
      return self.slice(index)
    s, k = self._segment(index).place(index)
    return self._offsets[s] + int(self.parts[s].order[k])

  def used_before(self, row: int) -> np.ndarray:
    """Rows [S] that each source has given before a row of the run."""
    return self._segment(row).used_before(row)

  def history(self, num_rows: int) -> Any:
    """All that the first `num_rows` rows depend on, as JSON values.

    Weights that take effect later, new sources with them, and a `max_epochs` that is not reached
    do not change it. One source alone has the history of a run without a mixture.
    """
    segments = [segment for segment in self._segments if segment.first_row < max(num_rows, 1)]
    used_S = np.sum([segment.units_S for segment in segments], axis=0) > 0
    names = [part.source.name for part in self.parts]
    used = np.flatnonzero(used_S).tolist()
    identities = {names[s]: self.parts[s].identity for s in used}
    if len(identities) == 1:
      return next(iter(identities.values()))
    # Lists, because the order of the sources decides between equal deadlines.
    shares = lambda units_S: [[names[s], int(units_S[s])] for s in np.flatnonzero(units_S)]
    described = [[segment.first_row, shares(segment.units_S)] for segment in segments]
    return {"sources": identities, "shares": described}

  def describe_use(self, num_rows: int) -> list[str]:
    """A line per source on its part of the first `num_rows` rows."""
    lines = []
    for part, used in zip(self.parts, self.used_before(num_rows).tolist(), strict=True):
      epochs = used / part.num_rows
      tokens = round(epochs * part.num_tokens)  # exact after whole epochs
      lines.append(f"{part.source.name}: {used:,} rows, {tokens:,} tokens, {epochs:.3g} epochs")
    return lines

  def describe_shares(self, first_row: Callable[[int], int]) -> str:
    """The shares of rows by step, on one line."""
    cells = []
    for segment in self._segments:
      step = bisect.bisect_right(range(1 << 31), segment.first_row, key=first_row) - 1
      share_S = segment.units_S / segment.units_S.sum()
      named = zip(self.parts, share_S, strict=True)
      shares = " ".join(f"{part.source.name} {share:.2%}" for part, share in named if share)
      cells.append(f"from step {step}: {shares}")
    return "; ".join(cells)

  def _segment(self, row: int) -> Segment:
    return self._segments[bisect.bisect_right(self._starts, row) - 1]


def interleave_sources(units_S: np.ndarray) -> np.ndarray:
  """The source [N] of each of N = sum(units_S) rows, such that repeating it keeps all shares.

  Among the first n rows, those of source s differ from n * units_S[s] / N by less than one.

  Source: Tijdeman, The chairman assignment problem (1980).
  """
  active_A = np.flatnonzero(units_S).tolist()
  units_A, total, slack = units_S[active_A].tolist(), int(units_S.sum()), 2 * len(active_A) - 2
  if not slack:
    return np.full(total, active_A[0])
  due_A = [0] * len(active_A)  # slack * total * (expected - given) rows
  sources = np.empty(total, np.int64)
  for n in range(total):
    due_A = [due + slack * units for due, units in zip(due_A, units_A, strict=True)]
    _, a = min(
      ((total * (slack - 1) - due) / units, a)  # the deadline
      for a, (due, units) in enumerate(zip(due_A, units_A, strict=True))
      if due >= total
    )
    due_A[a] -= slack * total
    sources[n] = active_A[a]
  return sources


def share_units(parts: Sequence[MixturePart], weight_S: Sequence[float]) -> np.ndarray:
  """Units [S] of rows, out of SHARE_UNITS, that give the sources their shares of the tokens.

  A source whose rows are not full gets more rows.

  Raises:
    UserError: a weight above 0 is rounded to no row.
  """
  rows_S = np.array(
    [w * part.num_rows / part.num_tokens for part, w in zip(parts, weight_S, strict=True)]
  )
  exact_S = SHARE_UNITS * rows_S / rows_S.sum()
  units_S = np.floor(exact_S).astype(np.int64)
  largest = np.argsort(units_S - exact_S, kind="stable")[: SHARE_UNITS - units_S.sum()]
  units_S[largest] += 1
  for part, weight, units in zip(parts, weight_S, units_S, strict=True):
    if weight and not units:
      raise UserError(
        f"dataset_mixture: weight={weight:g} of {part.source.name} is less than 1/{SHARE_UNITS} of "
        "the rows; write a larger weight, or 0"
      )
  return units_S


def _segments(parts: Sequence[MixturePart], first_row: Callable[[int], int]) -> list[Segment]:
  steps = sorted({0, *(step for part in parts for step, _ in part.source.weights)})
  segments: list[Segment] = []
  row, used_S = 0, np.zeros(len(parts), np.int64)
  while True:
    step = max(step for step in steps if first_row(step) <= row)
    is_open = [used < part.max_rows for used, part in zip(used_S, parts, strict=True)]
    weight_S = [
      part.source.weight_after(step) * more for part, more in zip(parts, is_open, strict=True)
    ]
    if not any(weight_S):
      raise UserError(
        f"dataset_mixture: from row {row} on (the weights of from_step={step}), every source with "
        "a weight has reached its max_epochs; raise one, or give another source a weight"
      )
    segment = Segment(row, share_units(parts, weight_S), used_S)
    segments.append(segment)
    ends = [first_row(later) for later in steps if first_row(later) > row]
    for s, part in enumerate(parts):
      if weight_S[s] and part.max_rows < math.inf:
        ends.append(segment.row_after(s, int(part.max_rows - used_S[s])))
    if not ends:
      return segments
    row = min(ends)
    used_S = segment.used_before(row)
