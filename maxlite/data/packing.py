"""Tokenized documents as rows of T positions: concatenated, best fit, whole, or one per row."""

import bisect
import hashlib
import sys
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from maxlite.data.token_cache import LOSS_MASK_BIT, IdReader, Tokens

Row = dict[str, np.ndarray]  # the fields of a Batch, each [T] or, stacked, [B, T]
ENDLESS = sys.maxsize  # the number of rows of a source that numbers those of all epochs
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


class Documents(NamedTuple):
  """Where the documents, or pieces of documents, of a split are in its file of ids."""

  offset_N: np.ndarray  # first id of each in the file
  length_N: np.ndarray  # ids of each


class Pieces(NamedTuple):
  """Documents cut into pieces that fit a row."""

  offset_N: np.ndarray  # first id of each piece in the file
  length_N: np.ndarray  # ids of each piece
  document_N: np.ndarray  # document of each piece, ascending from 0


def pad_row(
  tokens: np.ndarray,
  targets: np.ndarray,
  lengths: np.ndarray,
  size: int,
) -> Row:
  """Build a row of `size` positions from consecutive segments.

  Args:
    tokens: ids of all segments, at most `size`.
    targets: the target of each id; -1 means no target.
    lengths: positions of each segment; their sum is the number of `tokens`.
    size: positions of the row; those after the last segment are padding.
  """
  total = len(tokens)
  num_segments = len(lengths)
  segment_starts = np.cumsum(lengths) - lengths

  tokens_T = np.zeros(size, np.int32)
  tokens_T[:total] = tokens
  targets_T = np.zeros(size, np.int32)
  targets_T[:total] = np.maximum(targets, 0)
  segment_T = np.zeros(size, np.int32)
  segment_T[:total] = np.repeat(np.arange(1, num_segments + 1), lengths)
  position_T = np.zeros(size, np.int32)
  position_T[:total] = np.arange(total) - np.repeat(segment_starts, lengths)
  weight_T = np.zeros(size, np.float32)
  weight_T[:total] = targets >= 0
  return {
    "tokens_BT": tokens_T,
    "targets_BT": targets_T,
    "segment_BT": segment_T,
    "position_BT": position_T,
    "weight_BT": weight_T,
  }


class PackedRows(RowSource, Protocol):
  """Rows of several documents, which may be cut."""

  @property
  def num_cut(self) -> int:
    """Documents that are in more than one row or piece."""


def ordered_documents(tokens: Tokens, seed: int | None) -> Documents:
  """Return all documents in the order of the file, or shuffled once if `seed` is not None."""
  order = np.arange(len(tokens.lengths))
  if seed is not None:
    order = np.random.default_rng(seed).permutation(order)
  return Documents(tokens.offsets[order], tokens.lengths[order])


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
    documents = ordered_documents(tokens, order_seed)
    self._offsets = documents.offset_N
    num_documents = len(documents.length_N)
    # Start of each document in the concatenation, and the end of the last one.
    self._starts = np.zeros(num_documents + 1, np.int64)
    np.cumsum(documents.length_N, out=self._starts[1:])
    self._file = tokens.file
    self._row_length = row_length
    self.identity = _identity(tokens, self._offsets)

  @property
  def num_cut(self) -> int:
    """Number of documents that are in more than one row."""
    first_row_N = self._starts[:-1] // self._row_length
    last_row_N = (self._starts[1:] - 1) // self._row_length
    is_cut_N = first_row_N < last_row_N
    return int(is_cut_N.sum())

  @property
  def num_tokens(self) -> int:
    return int(self._starts[-1])

  def documents(self) -> Iterator[np.ndarray]:
    """Yield the ids of each document, in the order of the concatenation."""
    for offset, length in zip(self._offsets, np.diff(self._starts), strict=True):
      yield self._file.read(int(offset), int(length))

  def __len__(self) -> int:
    return (self.num_tokens + self._row_length - 1) // self._row_length

  def __getitem__(self, index: int) -> Row:
    # The row is positions [first, last) of the concatenation, from the documents [low, high).
    first = index * self._row_length
    last = min(first + self._row_length, self.num_tokens)
    low = int(np.searchsorted(self._starts, first, "right")) - 1
    high = int(np.searchsorted(self._starts, last, "left"))
    document_starts = self._starts[low:high]
    document_ends = self._starts[low + 1 : high + 1]
    begin = np.maximum(document_starts, first)
    end = np.minimum(document_ends, last)
    lengths = end - begin

    # If the last document continues after the row, its next id is the target of the last position.
    counts = lengths.copy()
    if document_ends[-1] > last:
      counts[-1] += 1
    offsets = self._offsets[low:high] + begin - document_starts
    ids = np.concatenate(_read_all(self._file, offsets, counts))

    num_inputs = last - first
    targets = np.full(num_inputs, -1, np.int32)
    targets[: len(ids) - 1] = ids[1:]
    ends_in_row = end == document_ends
    targets[end[ends_in_row] - first - 1] = -1
    return pad_row(ids[:num_inputs], targets, lengths, self._row_length)


def _read_all(file: IdReader, offsets: np.ndarray, counts: np.ndarray) -> list[np.ndarray]:
  """Read the ids [offset, offset + count) of each pair of `offsets` and `counts`."""
  ids = []
  for offset, count in zip(offsets.tolist(), counts.tolist(), strict=True):
    ids.append(file.read(offset, count))
  return ids


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
    num_rows = row_of.max(initial=-1) + 1
    self._offsets = offsets[by_row]
    self._lengths = lengths[by_row]
    # The pieces of row i are [bounds[i], bounds[i + 1]).
    self._bounds = np.searchsorted(row_of[by_row], np.arange(num_rows + 1))
    self._file = tokens.file
    self._row_length = row_length
    self._masked = masked
    self.identity = _identity(tokens, self._offsets, self._bounds)

  def __len__(self) -> int:
    return len(self._bounds) - 1

  @property
  def num_tokens(self) -> int:
    return int((self._lengths - 1).sum())

  def __getitem__(self, index: int) -> Row:
    first = int(self._bounds[index])
    last = int(self._bounds[index + 1])
    lengths = self._lengths[first:last]
    pieces = _read_all(self._file, self._offsets[first:last], lengths)
    inputs = np.concatenate([ids[:-1] for ids in pieces])
    targets = np.concatenate([ids[1:] for ids in pieces])
    row = pad_row(
      tokens=_without_loss_mask(inputs),
      targets=_without_loss_mask(targets),
      lengths=lengths - 1,
      size=self._row_length,
    )
    if self._masked:
      row["weight_BT"][: len(targets)] = targets & LOSS_MASK_BIT > 0
    return row


def _without_loss_mask(ids: np.ndarray) -> np.ndarray:
  """Return ids without LOSS_MASK_BIT, as int32."""
  return (ids & ~LOSS_MASK_BIT).astype(np.int32)


class PackedConversations(PackedPieces):
  """Row i is whole documents of at most T + 1 ids, never cut, in a fixed order.

  With `packing` a row holds several documents, otherwise one. Without, `document_N` is the document
  of each row.
  """

  def __init__(
    self,
    tokens: Tokens,
    row_length: int,
    order_seed: int | None,
    *,
    packing: bool,
  ) -> None:
    documents = ordered_documents(tokens, order_seed)
    if packing:
      row_of = first_fit(documents.length_N - 1, row_length)
    else:
      row_of = np.arange(len(documents.length_N))
    super().__init__(
      tokens,
      row_length,
      offsets=documents.offset_N,
      lengths=documents.length_N,
      row_of=row_of,
      masked=True,
    )

  @property
  def document_N(self) -> np.ndarray:
    return np.arange(len(self))


class PackedPairs(PackedPieces):
  """Row i is whole pairs of documents, never cut, in a fixed order.

  Documents 2 k and 2 k + 1 of the file are a pair. In a row, the documents of its first pair are
  segments 1 and 2, those of the next are 3 and 4, and so on. With `packing` a row holds several
  pairs, otherwise one. The documents of a pair have at most T + 2 ids together.
  """

  def __init__(
    self,
    tokens: Tokens,
    row_length: int,
    order_seed: int | None,
    *,
    packing: bool,
  ) -> None:
    length_N = tokens.lengths
    pair_order = np.arange(len(length_N) // 2)
    if order_seed is not None:
      pair_order = np.random.default_rng(order_seed).permutation(pair_order)
    first_N = 2 * pair_order
    document_N2 = np.stack([first_N, first_N + 1], axis=1)
    if packing:
      positions_N2 = length_N[document_N2] - 1
      row_of_pair = first_fit(positions_N2.sum(axis=1), row_length)
    else:
      row_of_pair = np.arange(len(pair_order))
    order = document_N2.reshape(-1)
    super().__init__(
      tokens,
      row_length,
      offsets=tokens.offsets[order],
      lengths=length_N[order],
      row_of=np.repeat(row_of_pair, 2),
      masked=True,
    )


def first_fit(lengths: np.ndarray, size: int) -> np.ndarray:
  """Assign each of `lengths` to the first open row of `size` with room, or to a new row.

  At most `_NUM_OPEN_ROWS` rows are open; a new row replaces the fullest.
  """
  room_by_slot = np.zeros(_NUM_OPEN_ROWS, np.int64)
  row_by_slot = np.zeros(_NUM_OPEN_ROWS, np.int64)
  rows = np.empty(len(lengths), np.int64)
  num_rows = 0
  for n, length in enumerate(lengths.tolist()):
    has_room = room_by_slot >= length
    slot = int(np.argmax(has_room))
    if not has_room[slot]:
      slot = int(np.argmin(room_by_slot))
      room_by_slot[slot] = size
      row_by_slot[slot] = num_rows
      num_rows += 1
    room_by_slot[slot] -= length
    rows[n] = row_by_slot[slot]
  return rows


class BestFitDocuments(PackedPieces):
  """Rows of whole documents; one longer than a row is split into full rows and a remainder.

  Every id is an input once, except the last of each document, and a target once, except the first
  of each. `num_cut` documents are split.
  """

  def __init__(self, tokens: Tokens, row_length: int, order_seed: int | None) -> None:
    pieces = _split_documents(tokens, row_length, order_seed)
    super().__init__(
      tokens,
      row_length,
      offsets=pieces.offset_N,
      lengths=pieces.length_N,
      row_of=best_fit(pieces.length_N - 1, row_length),
      masked=False,
    )
    num_pieces_N = np.bincount(pieces.document_N)
    self.num_cut = int((num_pieces_N > 1).sum())


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
    longest_first = np.argsort(-in_window, kind="stable")
    for n in longest_first.tolist():
      length = int(in_window[n])
      k = bisect.bisect_left(rooms, (length, -1))
      if k < len(rooms):
        room, row = rooms.pop(k)
      else:
        room = size
        row = num_rows
        num_rows += 1
      rows[start + n] = row
      if room > length:
        bisect.insort(rooms, (room - length, row))
  return _number_by_first_use(rows)


def _number_by_first_use(rows: np.ndarray) -> np.ndarray:
  """Renumber rows 0, 1, ... in the order in which they first occur."""
  _, first, index = np.unique(rows, return_index=True, return_inverse=True)
  by_first = np.argsort(first)
  rank = np.argsort(by_first)
  return rank[index]


class DocumentWindows(PackedPieces):
  """Row i is a window of T ids of one document; every id but the document's first is a target once.

  `document_N` is the document of each row. A window is predicted from its own ids alone.
  """

  def __init__(self, tokens: Tokens, row_length: int) -> None:
    pieces = _split_documents(tokens, row_length, seed=None)
    self.document_N = pieces.document_N
    super().__init__(
      tokens,
      row_length,
      offsets=pieces.offset_N,
      lengths=pieces.length_N,
      row_of=np.arange(len(pieces.length_N)),
      masked=False,
    )


def _split_documents(tokens: Tokens, row_length: int, seed: int | None) -> Pieces:
  """Cut the documents, in the order of `seed`, into pieces of at most `row_length` + 1 ids.

  A piece overlaps the next by one id: its last target is the first input of the next.
  """
  offsets, lengths = ordered_documents(tokens, seed)
  num_pieces = -(-(lengths - 1) // row_length)
  document_N = np.repeat(np.arange(len(lengths)), num_pieces)
  first_piece = np.cumsum(num_pieces) - num_pieces
  index_in_document = np.arange(len(document_N)) - first_piece[document_N]
  begin = index_in_document * row_length
  sizes = np.minimum(lengths[document_N] - begin, row_length + 1)
  return Pieces(
    offset_N=offsets[document_N] + begin,
    length_N=sizes,
    document_N=document_N,
  )
