"""Orders of rows: of one epoch (`maxlite.registry.ROW_ORDERS`), and of a mixture of sources.

The order of a mixture is a pure function of the row's number. Rows are numbered over the whole run,
so the order depends neither on hosts and workers nor on where a run was interrupted. It is a list
of segments with constant shares. A segment ends where a weight changes or a source reaches its
`max_epochs`, and repeats a table of at most SHARE_UNITS rows.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import grain
import numpy as np

from maxlite.config.mixture import MixtureSource
from maxlite.data.packing import ENDLESS
from maxlite.errors import UserError
from maxlite.storage.json_values import JsonObject

SHARE_UNITS = 10_000  # shares are rounded to multiples of 1 / SHARE_UNITS

# What the rows of a run depend on, as JSON values: the identity of the only source, or
# {"sources": {name: identity}, "shares": [[first row, [[name, units], ...]], ...]}.
History: TypeAlias = str | JsonObject


def shuffled_order(num_rows: int, seed: int) -> grain.MapDataset[int]:
  """All row indices in random order; when repeated, every epoch has another order."""
  return grain.MapDataset.range(num_rows).seed(seed).shuffle()


class BootstrapOrder(grain.MapDataset[int]):
  """Row indices drawn with replacement; entry n depends on the seed and n alone.

  Source: Efron, Bootstrap methods: another look at the jackknife (1979).
  """

  def __init__(self, num_rows: int, seed: int) -> None:
    super().__init__(grain.MapDataset.range(num_rows))
    self._num_rows = num_rows
    self._seed = seed

  def __len__(self) -> int:
    return self._num_rows

  def __getitem__(self, index: int | slice) -> int | grain.MapDataset[int]:
    if isinstance(index, slice):
      return self.slice(index)
    bits = np.random.Philox(key=self._seed, counter=index)
    return int(np.random.Generator(bits).integers(self._num_rows))


@dataclasses.dataclass(frozen=True)
class MixturePart:
  """The training rows of one source.

  `order` gives the rows of the source, epoch after epoch. `num_rows` and `num_tokens` are those of
  one epoch. `identity` changes if any row does.
  """

  source: MixtureSource
  order: grain.MapDataset[int]
  num_rows: int
  num_tokens: int
  identity: str

  @property
  def max_rows(self) -> float:
    """Rows that the run may read: `max_epochs`, rounded to a whole row."""
    epochs = self.source.max_epochs
    if epochs is None:
      return math.inf
    return max(round(epochs * self.num_rows), 1)


class RowPlace(NamedTuple):
  """Where a row of the run is from."""

  source: int  # index among the parts of the mixture
  row_of_source: int  # index among the rows that the run takes from this source


class Segment:
  """Rows from `first_row` on with constant shares of the sources."""

  def __init__(self, first_row: int, source_N: np.ndarray, used_S: np.ndarray) -> None:
    """
    Args:
      source_N: the source of each row of the table.
      used_S: rows of each source before the segment.
    """
    self.first_row = first_row
    self.used_S = used_S
    self.source_N = source_N
    self.units_S = np.bincount(source_N, minlength=len(used_S))
    # rank_N[n] is the number of rows of the same source before row n of the table.
    self.rank_N = np.zeros(len(self.source_N), np.int64)
    for s in np.flatnonzero(self.units_S):
      is_from_source_N = self.source_N == s
      self.rank_N[is_from_source_N] = np.arange(self.units_S[s])

  def place(self, row: int) -> RowPlace:
    """Return where a row of the run is from."""
    repeats, n = self._position(row)
    s = int(self.source_N[n])
    in_repeats = repeats * self.units_S[s]
    return RowPlace(s, int(self.used_S[s] + in_repeats + self.rank_N[n]))

  def used_before(self, row: int) -> np.ndarray:
    """Return the number of rows [S] of each source before a row of the run."""
    repeats, n = self._position(row)
    partial_S = np.bincount(self.source_N[:n], minlength=len(self.units_S))
    return self.used_S + repeats * self.units_S + partial_S

  def row_after(self, s: int, count: int) -> int:
    """Return the row that follows the `count`-th row of source `s` in this segment; `count` > 0."""
    units = int(self.units_S[s])
    repeats, rank = divmod(count - 1, units)
    places = np.flatnonzero(self.source_N == s)
    n = int(places[rank])
    return self.first_row + repeats * len(self.source_N) + n + 1

  def _position(self, row: int) -> tuple[int, int]:
    """Return how often the table is repeated before a row, and the row's index in the table."""
    return divmod(row - self.first_row, len(self.source_N))


class MixtureOrder(grain.MapDataset[int]):
  """Endless row indices into the concatenated rows of all parts."""

  def __init__(self, parts: Sequence[MixturePart], segments: Sequence[Segment]) -> None:
    super().__init__([part.order for part in parts])
    self.parts = parts
    num_rows = [part.num_rows for part in parts]
    self._offsets: list[int] = np.cumsum([0, *num_rows]).tolist()
    self._segments = segments
    self._starts = [segment.first_row for segment in self._segments]

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int | slice) -> int | grain.MapDataset[int]:
    if isinstance(index, slice):
      return self.slice(index)
    place = self._segment(index).place(index)
    order = self.parts[place.source].order
    return self._offsets[place.source] + int(order[place.row_of_source])

  def used_before(self, row: int) -> np.ndarray:
    """Rows [S] that each source has given before a row of the run."""
    return self._segment(row).used_before(row)

  def history(self, num_rows: int) -> History:
    """Return all that the first `num_rows` rows depend on, as JSON values.

    Weights that take effect later, new sources with them, and a `max_epochs` that is not reached
    do not change it. One source alone has the history of a run without a mixture.
    """
    segments = [segment for segment in self._segments if segment.first_row < max(num_rows, 1)]
    is_used_S = np.sum([segment.units_S for segment in segments], axis=0) > 0
    identities = {}
    for s in np.flatnonzero(is_used_S).tolist():
      part = self.parts[s]
      identities[part.source.name] = part.identity
    if len(identities) == 1:
      return next(iter(identities.values()))
    described = []
    for segment in segments:
      described.append([segment.first_row, self._named_units(segment.units_S)])
    return {"sources": identities, "shares": described}

  def _named_units(self, units_S: np.ndarray) -> list[list[str | int]]:
    """Return [name, units] of the sources with units, as JSON values.

    It is a list, because the order of the sources decides between equal deadlines.
    """
    named: list[list[str | int]] = []
    for s in np.flatnonzero(units_S).tolist():
      named.append([self.parts[s].source.name, int(units_S[s])])
    return named

  def describe_use(self, num_rows: int) -> list[str]:
    """Return a line per source on its part of the first `num_rows` rows."""
    lines = []
    for part, used in zip(self.parts, self.used_before(num_rows).tolist(), strict=True):
      if part.num_rows == ENDLESS:
        lines.append(f"{part.source.name}: {used:,} rows")
        continue
      epochs = used / part.num_rows
      tokens = round(epochs * part.num_tokens)  # exact after whole epochs
      lines.append(f"{part.source.name}: {used:,} rows, {tokens:,} tokens, {epochs:.3g} epochs")
    return lines

  def describe_shares(self, first_row: Callable[[int], int]) -> str:
    """Return the shares of rows by step, on one line.

    Args:
      first_row: gives the first row of the batch after a number of batches.
    """
    cells = []
    for segment in self._segments:
      step = bisect.bisect_right(range(1 << 31), segment.first_row, key=first_row) - 1
      share_S = segment.units_S / segment.units_S.sum()
      shares = []
      for part, share in zip(self.parts, share_S, strict=True):
        if share:
          shares.append(f"{part.source.name} {share:.2%}")
      cells.append(f"from step {step}: {' '.join(shares)}")
    return "; ".join(cells)

  def _segment(self, row: int) -> Segment:
    """Return the segment that a row of the run is in."""
    n = bisect.bisect_right(self._starts, row) - 1
    return self._segments[n]


def interleave_sources(units_S: np.ndarray) -> np.ndarray:
  """Return the source [N] of each of N = sum(units_S) rows, whose repetition keeps all shares.

  Among the first n rows, source s has n * units_S[s] / N rows up to a difference of less than one.

  Source: Tijdeman, The chairman assignment problem (1980).
  """
  active_A = np.flatnonzero(units_S).tolist()
  units_A = units_S[active_A].tolist()
  total = int(units_S.sum())
  slack = 2 * len(active_A) - 2
  if not slack:
    return np.full(total, active_A[0])
  due_A = [0] * len(active_A)  # slack * total * (expected rows - given rows)
  sources = np.empty(total, np.int64)
  for n in range(total):
    for a, units in enumerate(units_A):
      due_A[a] += slack * units
    next_a = _earliest_deadline(due_A, units_A, total, slack)
    due_A[next_a] -= slack * total
    sources[n] = active_A[next_a]
  return sources


def _earliest_deadline(due_A: list[int], units_A: list[int], total: int, slack: int) -> int:
  """Return the source, of those that a row is due from, whose row must be given the earliest.

  Of equal deadlines, it is the first source's.
  """
  first = -1
  first_deadline = math.inf
  for a, due in enumerate(due_A):
    if due < total:
      continue
    deadline = (total * (slack - 1) - due) / units_A[a]
    if deadline < first_deadline:
      first = a
      first_deadline = deadline
  return first


def share_units(parts: Sequence[MixturePart], weight_S: Sequence[float]) -> np.ndarray:
  """Return units [S] of rows, out of SHARE_UNITS, that give the sources their shares of the tokens.

  A source whose rows are not full gets more rows.

  Raises:
    UserError: a weight above 0 is rounded to no row.
  """
  rows = []
  for part, weight in zip(parts, weight_S, strict=True):
    rows.append(weight * part.num_rows / part.num_tokens)
  rows_S = np.array(rows)
  exact_S = SHARE_UNITS * rows_S / rows_S.sum()
  units_S = np.floor(exact_S).astype(np.int64)
  num_left = SHARE_UNITS - units_S.sum()
  largest_remainders = np.argsort(units_S - exact_S, kind="stable")[:num_left]
  units_S[largest_remainders] += 1
  for part, weight, units in zip(parts, weight_S, units_S, strict=True):
    if weight and not units:
      raise UserError(
        f"dataset_mixture: weight={weight:g} of {part.source.name} is less than 1/{SHARE_UNITS} of "
        "the rows; write a larger weight, or 0"
      )
  return units_S


def mixture_segments(
  parts: Sequence[MixturePart], first_row: Callable[[int], int]
) -> list[Segment]:
  """Return the segments of the whole run; the last one has no end.

  Args:
    first_row: gives the first row of the batch after a number of batches.

  Raises:
    UserError: at some step all sources with a weight have reached their `max_epochs`.
  """
  steps = _steps_of_weights(parts)
  segments: list[Segment] = []
  row = 0
  used_S = np.zeros(len(parts), np.int64)
  while True:
    step = max(step for step in steps if first_row(step) <= row)
    weight_S = _open_weights(parts, step, used_S)
    if not any(weight_S):
      raise UserError(
        f"dataset_mixture: from row {row} on (the weights of from_step={step}), every source with "
        "a weight has reached its max_epochs; raise one, or give another source a weight"
      )
    units_S = share_units(parts, weight_S)
    source_N = interleave_sources(units_S // math.gcd(*units_S.tolist()))
    segment = Segment(row, source_N, used_S)
    segments.append(segment)
    ends = [first_row(later) for later in steps if first_row(later) > row]
    for s, part in enumerate(parts):
      if weight_S[s] and part.max_rows < math.inf:
        num_left = int(part.max_rows - used_S[s])
        ends.append(segment.row_after(s, num_left))
    if not ends:
      return segments
    row = min(ends)
    used_S = segment.used_before(row)


def _steps_of_weights(parts: Sequence[MixturePart]) -> list[int]:
  """Return the steps, from 0, at which the weight of a source changes."""
  steps = {0}
  for part in parts:
    for step, _ in part.source.weights:
      steps.add(step)
  return sorted(steps)


def _open_weights(parts: Sequence[MixturePart], step: int, used_S: np.ndarray) -> list[float]:
  """Return the weights [S] after `step`, 0 for sources that have reached their `max_epochs`."""
  weight_S = []
  for part, used in zip(parts, used_S, strict=True):
    if used < part.max_rows:
      weight_S.append(part.source.weight_after(step))
    else:
      weight_S.append(0.0)
  return weight_S
