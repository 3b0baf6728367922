"""Tokenized documents as rows of T positions: concatenated, best fit, whole, or one per row."""

import bisect
import hashlib
from typing import Protocol

import numpy as np

from maxlite.data.token_cache import LOSS_MASK_BIT, TokenFile, Tokens

Row = dict[str, np.ndarray]  # the fields of a Batch, each [T] or, stacked, [B, T]
_NUM_OPEN_ROWS = 64
# Documents that best_fit packs together, which bounds its open rows. Fewer leave more padding
# (measured in docs/data.md).
WINDOW = 8192


class RowSource(Protocol):
  """Random access to rows of T positions; `identity` changes if any row does."""

  identity: str

  @property
  def num_tokens(self) -> int:
    """Positions of all rows that are not padding."""

  def __len__(self) -> int: ...

  def __getitem__(self, index: int) -> Row: ...


class DocumentRows(RowSource, Protocol):
  """Rows of (parts of) one document each."""

  @property
  def document_N(self) -> np.ndarray:
    """The document of each row, ascending from 0."""


def pad_row(tokens: np.ndarray, targets: np.ndarray, lengths: np.ndarray, size: int) -> Row:
  """Build a row of `size` positions from segments of `lengths`; target -1 means no target."""
  total = len(tokens)
  names = ("tokens_BT", "targets_BT", "segment_BT", "position_BT")
  row = {name: np.zeros(size, np.int32) for name in names}
  row["tokens_BT"][:total] = tokens
  row["targets_BT"][:total] = np.maximum(targets, 0)
  row["segment_BT"][:total] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
  begin = np.cumsum(lengths) - lengths
  row["position_BT"][:total] = np.arange(total) - np.repeat(begin, lengths)
  row["weight_BT"] = np.zeros(size, np.float32)
  row["weight_BT"][:total] = targets >= 0
  return row


class PackedRows(RowSource, Protocol):
  """Rows of several documents, which may be cut."""

  @property
  def num_cut(self) -> int:
    """Documents that are in more than one row or piece."""


def ordered_documents(tokens: Tokens, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
  """(offset in the file, length) of each document, shuffled once unless `seed` is None."""
  order = np.arange(len(tokens.lengths))
  if seed is not None:
    order = np.random.default_rng(seed).permutation(order)
  return (np.cumsum(tokens.lengths) - tokens.lengths)[order], tokens.lengths[order]


def _identity(tokens: Tokens, *placement: np.ndarray) -> str:
  # The placement is hashed too: another NumPy version may draw another order from the same seed.
  digest = hashlib.blake2b(digest_size=8)
  for array in placement:
    digest.update(array.tobytes())
  return f"{tokens.digest} {digest.hexdigest()}"


class PackedDocuments:
  """Row i is positions [i * T, (i + 1) * T) of all documents concatenated in a fixed order.

  Every id is an input exactly once, and a target exactly once unless it starts a document: the
  target of a row's last position is read past its end. Memory: 16 bytes per document; ids are read
  from the file on access.
  """

  def __init__(self, tokens: Tokens, row_length: int, order_seed: int | None) -> None:
    self._offsets, lengths = ordered_documents(tokens, order_seed)
    self._starts = np.zeros(len(lengths) + 1, np.int64)  # of each document in the concatenation
    np.cumsum(lengths, out=self._starts[1:])
    self._file, self._row_length = TokenFile(tokens), row_length
    self.identity = _identity(tokens, self._offsets)

  @property
  def num_cut(self) -> int:
    """Documents that are in more than one row."""
    starts = self._starts
    return int((starts[:-1] // self._row_length < (starts[1:] - 1) // self._row_length).sum())

  @property
  def num_tokens(self) -> int:
    return int(self._starts[-1])

  def __len__(self) -> int:
    return (int(self._starts[-1]) + self._row_length - 1) // self._row_length

  def __getitem__(self, index: int) -> Row:
    first = index * self._row_length
    last = min(first + self._row_length, int(self._starts[-1]))
    low = int(np.searchsorted(self._starts, first, "right")) - 1
    high = int(np.searchsorted(self._starts, last, "left"))  # documents [low, high) are in the row
    begin = np.maximum(self._starts[low:high], first)
    end = np.minimum(self._starts[low + 1 : high + 1], last)
    counts = end - begin
    counts[-1] += self._starts[high] > last  # the target past the end, if the document continues
    offsets = self._offsets[low:high] + begin - self._starts[low:high]
    ids = np.concatenate(list(map(self._file.read, offsets.tolist(), counts.tolist())))
    targets = np.full(last - first, -1, np.int32)
    targets[: len(ids) - 1] = ids[1:]
    is_last = end == self._starts[low + 1 : high + 1]
    targets[end[is_last] - first - 1] = -1
    return pad_row(ids[: last - first], targets, end - begin, self._row_length)


class PackedPieces:
  """Row i is the pieces of documents that `row_of` assigns to it, each a segment.

  A piece has at most T + 1 ids, of which the last is only a target. If `masked`, a target has
  weight if its LOSS_MASK_BIT is set. Memory: 24 bytes per piece.
  """

  def __init__(
    self,
    tokens: Tokens,
    row_length: int,
    offsets: np.ndarray,
    lengths: np.ndarray,
    row_of: np.ndarray,
    *,
    masked: bool,
  ) -> None:
    by_row = np.argsort(row_of, kind="stable")
    self._offsets, self._lengths = offsets[by_row], lengths[by_row]
    self._bounds = np.searchsorted(row_of[by_row], np.arange(row_of.max(initial=-1) + 2))
    self._file, self._row_length, self._masked = TokenFile(tokens), row_length, masked
    self.identity = _identity(tokens, self._offsets, self._bounds)

  def __len__(self) -> int:
    return len(self._bounds) - 1

  @property
  def num_tokens(self) -> int:
    return int((self._lengths - 1).sum())

  def __getitem__(self, index: int) -> Row:
    documents = slice(*self._bounds[index : index + 2].tolist())
    offsets, lengths = self._offsets[documents], self._lengths[documents]
    read = list(map(self._file.read, offsets.tolist(), lengths.tolist()))
    inputs = np.concatenate([ids[:-1] for ids in read])
    targets = np.concatenate([ids[1:] for ids in read])
    unmasked = lambda ids: (ids & ~LOSS_MASK_BIT).astype(np.int32)
    row = pad_row(unmasked(inputs), unmasked(targets), lengths - 1, self._row_length)
    if self._masked:
      row["weight_BT"][: len(targets)] = targets & LOSS_MASK_BIT > 0
    return row


class PackedConversations(PackedPieces):
  """Row i is whole documents of at most T + 1 ids, never cut, in a fixed order.

  With `packing` a row holds several documents, otherwise one. Without, `document_N` is the document
  of each row.
  """

  def __init__(self, tokens: Tokens, row_length: int, order_seed: int | None, *, packing: bool):
    offsets, lengths = ordered_documents(tokens, order_seed)
    row_of = first_fit(lengths - 1, row_length) if packing else np.arange(len(lengths))
    super().__init__(tokens, row_length, offsets, lengths, row_of, masked=True)

  @property
  def document_N(self) -> np.ndarray:
    return np.arange(len(self))


def first_fit(lengths: np.ndarray, size: int) -> np.ndarray:
  """Assign each of `lengths` to the first open row of `size` with room, or to a new row.

  At most `_NUM_OPEN_ROWS` rows are open; a new row replaces the fullest.
  """
  room = np.zeros(_NUM_OPEN_ROWS, np.int64)
  row = np.zeros(_NUM_OPEN_ROWS, np.int64)
  rows = np.empty(len(lengths), np.int64)
  num_rows = 0
  for n, length in enumerate(lengths.tolist()):
    has_room = room >= length
    slot = int(np.argmax(has_room))
    if not has_room[slot]:
      slot = int(np.argmin(room))
      room[slot], row[slot] = size, num_rows
      num_rows += 1
    room[slot] -= length
    rows[n] = row[slot]
  return rows


class BestFitDocuments(PackedPieces):
  """Rows of whole documents; one longer than a row is split into full rows and a remainder.

  Every id is an input once, except the last of each document, and a target once, except the first
  of each. `num_cut` documents are split.
  """

  def __init__(self, tokens: Tokens, row_length: int, order_seed: int | None) -> None:
    offsets, lengths, document_N = _split_documents(tokens, row_length, order_seed)
    rows = best_fit(lengths - 1, row_length)
    super().__init__(tokens, row_length, offsets, lengths, rows, masked=False)
    self.num_cut = int((np.bincount(document_N) > 1).sum())


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


class DocumentWindows(PackedPieces):
  """Row i is a window of T ids of one document; every id but the document's first is a target once.

  `document_N` is the document of each row. A window is predicted from its own ids alone.
  """

  def __init__(self, tokens: Tokens, row_length: int) -> None:
    offsets, lengths, self.document_N = _split_documents(tokens, row_length, None)
    rows = np.arange(len(lengths))
    super().__init__(tokens, row_length, offsets, lengths, rows, masked=False)


def _split_documents(
  tokens: Tokens, row_length: int, seed: int | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(offset in the file, length, document) of pieces of at most `row_length` + 1 ids.

  A piece overlaps the next by one id: its last target is the first input of the next.
  """
  offsets, lengths = ordered_documents(tokens, seed)
  num_pieces = -(-(lengths - 1) // row_length)
  document_N = np.repeat(np.arange(len(lengths)), num_pieces)
  first = np.cumsum(num_pieces) - num_pieces
  begin = (np.arange(len(document_N)) - first[document_N]) * row_length
  sizes = np.minimum(lengths[document_N] - begin, row_length + 1)
  return offsets[document_N] + begin, sizes, document_N
