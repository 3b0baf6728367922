"""Rows of a stream that are not trained on (`skip_rows`).

Rows keep the numbers that they have without the ranges, so a range that begins after the rows read
so far does not change which these were: a run goes back to a checkpoint and leaves out rows after
it.
"""

import dataclasses
import sys

import grain

Ranges = tuple[tuple[int, int], ...]  # (first row, row after the last), ascending and apart


@dataclasses.dataclass(frozen=True)
class SkippedRows:
  """The numbers of rows, in a stream of which `ranges` are left out."""

  ranges: Ranges

  def number(self, n: int) -> int:
    """Return the number of the row that follows n rows that were trained on."""
    for first, end in self.ranges:
      if n < first:
        break
      n += end - first
    return n

  def num_passed(self, num_rows: int) -> int:
    """Return the number after that of the last of the first `num_rows` rows trained on."""
    if num_rows == 0:
      return 0
    return self.number(num_rows - 1) + 1


class KeptRows(grain.MapDataset[int]):
  """An endless order without skipped rows."""

  def __init__(self, order: grain.MapDataset[int], skipped: SkippedRows) -> None:
    super().__init__(order)
    self._skipped = skipped

  def __len__(self) -> int:
    return sys.maxsize

  def __getitem__(self, index: int | slice) -> int | grain.MapDataset[int]:
    if isinstance(index, slice):
      return self.slice(index)
    return self._parent[self._skipped.number(index)]
