"""Packing that keeps documents whole where they fit in a row."""

import bisect

import numpy as np

from maxlite.data.packing import PackedPieces, ordered_documents
from maxlite.data.token_cache import Tokens

# Documents that are packed together, which bounds the open rows in memory. Fewer leave more padding
# (measured in docs/data.md).
WINDOW = 8192


class BestFitDocuments(PackedPieces):
  """Rows of whole documents; one longer than a row is split into full rows and a remainder.

  Every id is an input once, except the last of each document, and a target once, except the first
  of each. `num_cut` documents are split.
  """

  def __init__(self, tokens: Tokens, row_length: int, order_seed: int | None) -> None:
    offsets, lengths = ordered_documents(tokens, order_seed)
    num_pieces = -(-(lengths - 1) // row_length)
    document = np.repeat(np.arange(len(lengths)), num_pieces)
    first = np.cumsum(num_pieces) - num_pieces
    begin = (np.arange(len(document)) - first[document]) * row_length
    # A piece overlaps the next by one id: its last target is the first input of the next.
    sizes = np.minimum(lengths[document] - begin, row_length + 1)
    rows = best_fit(sizes - 1, row_length)
    super().__init__(tokens, row_length, offsets[document] + begin, sizes, rows, masked=False)
    self.num_cut = int((num_pieces > 1).sum())


def best_fit(lengths: np.ndarray, size: int, window: int = WINDOW) -> np.ndarray:
  """Assign each of `lengths` to the fullest row of `size` with room, or to a new row.

  Within a window of consecutive documents the longest are placed first. Rows are numbered by their
  first document.

  Source: Johnson, Near-optimal bin packing algorithms (1973): best fit decreasing.
  """
  rows = np.empty(len(lengths), np.int64)
  num_rows = 0
  for start in range(0, len(lengths), window):
    rooms: list[tuple[int, int]] = []  # (room, row), ascending
    in_window = lengths[start : start + window]
    for n in np.argsort(-in_window, kind="stable").tolist():
      length = int(in_window[n])
      k = bisect.bisect_left(rooms, (length, -1))
      if k < len(rooms):
        room, row = rooms.pop(k)
      else:
        room, row = size, num_rows
        num_rows += 1
      rows[start + n] = row
      if room > length:
        bisect.insort(rooms, (room - length, row))
  _, first, index = np.unique(rows, return_index=True, return_inverse=True)
  return np.argsort(np.argsort(first))[index]
