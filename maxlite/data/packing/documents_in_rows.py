"""Tokenized documents joined end to end and cut into rows of equal length."""

import hashlib

import numpy as np

from maxlite.data.rows import Row, pad_row
from maxlite.data.token_cache import TokenFile, Tokens


class PackedRows:
  """Row i is positions [i * T, (i + 1) * T) of all documents joined, in an order drawn once.

  Every id is an input exactly once, and a target exactly once unless it is a document's first: the
  target at a row's last position is looked up past its end. Memory holds 16 bytes per document;
  ids are read from the file as they are needed.
  """

  def __init__(self, tokens: Tokens, row_length: int, order_seed: int | None) -> None:
    lengths, num_documents = tokens.lengths, len(tokens.lengths)
    order = np.arange(num_documents)
    if order_seed is not None:
      order = np.random.default_rng(order_seed).permutation(num_documents)
    self._offsets = (np.cumsum(lengths) - lengths)[order]  # of each document in the file
    self._starts = np.zeros(num_documents + 1, np.int64)  # of each document in the joined stream
    np.cumsum(lengths[order], out=self._starts[1:])
    self._file, self._row_length = TokenFile(tokens), row_length
    # Of the order too: another version of NumPy may draw it differently from the same seed.
    places = hashlib.blake2b(self._offsets, digest_size=8).hexdigest()
    self.identity = f"{tokens.digest} {places}"

  def __len__(self) -> int:
    return (int(self._starts[-1]) + self._row_length - 1) // self._row_length

  def __getitem__(self, index: int) -> Row:
    first = index * self._row_length
    last = min(first + self._row_length, int(self._starts[-1]))
    low = int(np.searchsorted(self._starts, first, "right")) - 1
    high = int(np.searchsorted(self._starts, last, "left"))  # documents [low, high) are in the row
    begin = np.maximum(self._starts[low:high], first)
    end = np.minimum(self._starts[low + 1 : high + 1], last)
    # One id more than the row has, where the last document goes on.
    more = int(self._starts[high] > last)
    pieces = self._read(self._offsets[low:high] + begin - self._starts[low:high], end - begin, more)
    ids = np.concatenate(pieces)
    targets = np.full(last - first, -1, np.int32)
    targets[: len(ids) - 1] = ids[1:]
    is_last = end == self._starts[low + 1 : high + 1]
    targets[end[is_last] - first - 1] = -1
    return pad_row(ids[: last - first], targets, end - begin, self._row_length)

  def _read(self, offsets: np.ndarray, counts: np.ndarray, more: int) -> list[np.ndarray]:
    """The ids of each piece; the last piece has `more` ids on top of its count."""
    counts = counts.tolist()
    counts[-1] += more
    return list(map(self._file.read, offsets.tolist(), counts))
