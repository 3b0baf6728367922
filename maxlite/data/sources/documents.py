"""Held-out documents one by one: rows that have no other document beside them."""

import dataclasses

import numpy as np

from maxlite.data.rows import Row, Rows, pad_row
from maxlite.data.token_cache import TokenFile, Tokens


@dataclasses.dataclass(frozen=True)
class Documents:
  """Rows of which each holds a part of one document, and which document that is, from 0 on."""

  rows: Rows
  document_N: np.ndarray


class WindowRows:
  """Row i is a window of T ids of one document, each of which predicts the next id.

  A document's windows follow one another and end with it, so that each of its ids but the first is
  a target once. What a window predicts, it predicts from its own ids alone.
  """

  def __init__(self, tokens: Tokens, row_length: int) -> None:
    num_documents = len(tokens.lengths)
    num_windows = -(-(tokens.lengths - 1) // row_length)
    self.document_N = np.repeat(np.arange(num_documents), num_windows)
    self._first = np.cumsum(num_windows) - num_windows  # window of each document
    self._offsets, self._lengths = np.cumsum(tokens.lengths) - tokens.lengths, tokens.lengths
    self._file, self._row_length = TokenFile(tokens), row_length
    self.identity = f"{tokens.digest} by document"

  def __len__(self) -> int:
    return len(self.document_N)

  def __getitem__(self, index: int) -> Row:
    document = self.document_N[index]
    begin = int(index - self._first[document]) * self._row_length
    count = min(int(self._lengths[document]) - begin, self._row_length + 1)
    ids = self._file.read(int(self._offsets[document]) + begin, count).astype(np.int32)
    return pad_row(ids[:-1], ids[1:], np.array([count - 1]), self._row_length)


def windows(tokens: Tokens, row_length: int) -> Documents:
  """Documents that may be longer than a row."""
  rows = WindowRows(tokens, row_length)
  return Documents(rows, rows.document_N)
