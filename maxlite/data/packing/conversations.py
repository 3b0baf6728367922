"""Conversations that are never cut: several to a row as they fit, or each in a row of its own."""

import hashlib

import numpy as np

from maxlite.data.rows import Row, pad_row
from maxlite.data.sources.chat import LEARNED
from maxlite.data.token_cache import TokenFile, Tokens

_NUM_OPEN = 64


class ConversationRows:
  """Row i is some whole documents of at most T + 1 ids, in an order drawn once.

  Targets have weight where they are marked as LEARNED. The last id of a document is no input, since
  nothing follows it. Memory holds 24 bytes per document.
  """

  def __init__(
    self, tokens: Tokens, row_length: int, order_seed: int | None, *, packing: bool
  ) -> None:
    order = np.arange(len(tokens.lengths))
    if order_seed is not None:
      order = np.random.default_rng(order_seed).permutation(order)
    lengths = tokens.lengths[order]
    row_of = first_fit(lengths - 1, row_length) if packing else np.arange(len(order))
    by_row = np.argsort(row_of, kind="stable")
    self._lengths = lengths[by_row]
    self._offsets = (np.cumsum(tokens.lengths) - tokens.lengths)[order][by_row]
    self._bounds = np.searchsorted(row_of[by_row], np.arange(row_of.max(initial=-1) + 2))
    self._file, self._row_length = TokenFile(tokens), row_length
    # Of the order too: another version of NumPy may draw it differently from the same seed.
    places = hashlib.blake2b(self._offsets, digest_size=8)
    places.update(self._bounds.tobytes())
    self.identity = f"{tokens.digest} {places.hexdigest()}"

  def __len__(self) -> int:
    return len(self._bounds) - 1

  def __getitem__(self, index: int) -> Row:
    documents = slice(*self._bounds[index : index + 2].tolist())
    offsets, lengths = self._offsets[documents], self._lengths[documents]
    read = list(map(self._file.read, offsets.tolist(), lengths.tolist()))
    tokens, following = (
      np.concatenate([ids[part] for ids in read]) for part in (slice(-1), slice(1, None))
    )
    own = lambda ids: (ids & ~LEARNED).astype(np.int32)
    row = pad_row(own(tokens), own(following), lengths - 1, self._row_length)
    row["weight_BT"][: len(following)] = following & LEARNED > 0
    return row


def first_fit(lengths: np.ndarray, size: int) -> np.ndarray:
  """The row of each of `lengths`: of the open ones the first that has room, or a new one.

  So many rows are open at once; when another is begun, the fullest of them is closed.
  """
  room = np.zeros(_NUM_OPEN, np.int64)
  row = np.zeros(_NUM_OPEN, np.int64)
  rows = np.empty(len(lengths), np.int64)
  num_rows = 0
  for n, length in enumerate(lengths.tolist()):
    has_room = room >= length
    place = int(np.argmax(has_room))
    if not has_room[place]:
      place = int(np.argmin(room))
      room[place], row[place] = size, num_rows
      num_rows += 1
    room[place] -= length
    rows[n] = row[place]
  return rows
