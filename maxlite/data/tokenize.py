"""Tokenization to files, on all cores, with progress, resumable after a kill.

Documents are read once, in order, in pieces. Batches of pieces are encoded by the tokenizer's
library on all cores and appended to the files of their split. Every few seconds the number of
pieces in the files is recorded (`PartialFiles`); a later process reads past those pieces and
continues with the next.
"""

import datetime
import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from maxlite.data.partial_files import PartialFiles
from maxlite.data.split import SplitDocuments
from maxlite.data.tokenizer import Tokenizer
from maxlite.errors import get_logger, write_line

SPLITS = ("train", "eval")
BATCH_BYTES = 3 << 19  # encoded at once
# Of a document on each side of a cut. Ids depend on the text around them, but not on text so far.
OVERLAP_BYTES = 1 << 11
_SAVE_SECONDS = 5.0
_REPORT_SECONDS = 10.0
_PIECE_OVERHEAD_BYTES = 64  # of the Python objects of a piece

log = get_logger(__name__)


class Piece(NamedTuple):
  """A part of a document of a split; `content` is None after the last part.

  `before` and `after` are up to OVERLAP_BYTES of the document around it.
  """

  split: str
  content: bytes | None
  before: bytes = b""
  after: bytes = b""


class EncodedPiece(NamedTuple):
  """The ids of a piece, and whether they end a document of the split."""

  split: str
  ids: np.ndarray
  is_last: bool


class WrittenTokens(NamedTuple):
  """The number of ids of each document by split, and the number of documents dropped."""

  lengths: dict[str, np.ndarray]
  num_dropped: int


class DocumentTokenizer(Protocol):
  """Converts what a reader yields to documents of ids.

  `identity` changes if any id does. `counts` has the documents that were changed or left out, by
  reason. `is_resumable`: whether ids depend on their piece alone, and `counts` on none.
  """

  identity: str
  dtype: np.dtype
  counts: Counter[str]
  is_resumable: bool

  def encode(self, pieces: Iterator[Piece], *, is_open: bool) -> Iterator[list[EncodedPiece]]:
    """Yield the ids of consecutive pieces in batches; a document may become several, or none.

    Args:
      is_open: whether the first piece continues a document.
    """


class TextTokenizer:
  """Text documents: the tokenizer's prefix, the text, eos."""

  is_resumable = True

  def __init__(self, tokenizer: Tokenizer) -> None:
    self._tokenizer = tokenizer
    self.identity = tokenizer.identity
    fits_16_bits = tokenizer.size <= 1 << 16
    self.dtype: np.dtype = np.dtype(np.uint16 if fits_16_bits else np.uint32)
    self.counts: Counter[str] = Counter()
    self._prefix = np.asarray(tokenizer.prefix_ids, self.dtype)
    self._eos = np.asarray([tokenizer.eos], self.dtype)
    self._has_warned = False

  def encode(self, pieces: Iterator[Piece], *, is_open: bool) -> Iterator[list[EncodedPiece]]:
    """Yield the ids of consecutive pieces, an entry for each: together, the ids of the document."""
    for batch in _batches(pieces):
      texts = []
      for piece in batch:
        if piece.content is not None:
          # Pieces before and after a cut have the same text around it, so they agree on its ids.
          texts.append(piece.before and piece.before + _start(piece.content))
          texts.append(piece.before + piece.content + piece.after)
          texts.append(piece.after and _end(piece.content) + piece.after)
      remaining_ids = iter(self._tokenizer.encode_batch(texts))
      encoded = []
      for piece in batch:
        is_last = piece.content is None
        if is_last:
          ids = self._eos
        else:
          around_start, ids, around_end = itertools.islice(remaining_ids, 3)
          ids = self._cut(piece, around_start, ids, around_end)
        if not is_open:
          ids = np.concatenate([self._prefix, ids])
        encoded.append(EncodedPiece(piece.split, ids, is_last))
        is_open = not is_last
      yield encoded

  def _cut(
    self, piece: Piece, around_start: np.ndarray, ids: np.ndarray, around_end: np.ndarray
  ) -> np.ndarray:
    """Return the ids of a piece, from the ids of the piece with the text around it.

    A cut is in the middle of the ids of the text around it. Encoding this text in pieces instead
    could give other ids there: a tokenizer may put a space before a text, and may read white space
    by what follows.
    """
    first = 0
    last = len(ids)
    if piece.before:
      first = len(around_start) // 2
      self._require_same(ids[:first], around_start[:first])
    if piece.after:
      rest = around_end[len(around_end) // 2 :]
      last -= len(rest)
      self._require_same(ids[last:], rest)
    return ids[first:last]

  def _require_same(self, ids: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(ids, expected) and not self._has_warned:
      self._has_warned = True
      log.warning(
        "the ids of a text depend on more than %d bytes around them: where a long document is cut "
        "into pieces, they differ from those of the whole",
        OVERLAP_BYTES,
      )


def _start(text: bytes) -> bytes:
  """Return up to OVERLAP_BYTES from the start of a text in UTF-8, in whole characters."""
  end = min(OVERLAP_BYTES, len(text))
  while end < len(text) and text[end] & 0xC0 == 0x80:
    end -= 1
  return text[:end]


def _end(text: bytes) -> bytes:
  """Return up to OVERLAP_BYTES from the end of a text in UTF-8, in whole characters."""
  start = max(len(text) - OVERLAP_BYTES, 0)
  while start < len(text) and text[start] & 0xC0 == 0x80:
    start += 1
  return text[start:]


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
  """Group consecutive pieces to batches of about BATCH_BYTES."""
  batch: list[Piece] = []
  size = 0
  for piece in pieces:
    batch.append(piece)
    size += len(piece.content or b"") + _PIECE_OVERHEAD_BYTES
    if size >= BATCH_BYTES:
      yield batch
      batch = []
      size = 0
  if batch:
    yield batch


def write_tokens(
  documents: SplitDocuments,
  tokenizer: DocumentTokenizer,
  folder: Path,
  total_bytes: int,
  source_digests: Mapping[str, str],
) -> WrittenTokens:
  """Write the ids of each split to `folder`/SPLIT.bin, after what an earlier process has written.

  Args:
    documents: all documents, in the order of the files.
    tokenizer: converts them to ids.
    folder: an existing folder.
    total_bytes: size of the text, to estimate the remaining time; 0 if unknown.
    source_digests: digest of each file of the text, by name.
  """
  dropped = Counter[str]()
  report = _Report(total_bytes)
  pieces = report.count(_pieces(documents, dropped))
  ids_files = [_ids_file(split) for split in SPLITS]
  lengths_files = [_lengths_file(split) for split in SPLITS]
  files = PartialFiles(folder, [*ids_files, *lengths_files], source_digests)
  with files.open() as progress:
    for _ in itertools.islice(pieces, progress.num_pieces):
      pass
    report.start(resumes=progress.num_pieces > 0)
    saved = time.monotonic()
    for batch in tokenizer.encode(pieces, is_open=progress.open_ids > 0):
      for encoded in batch:
        ids = encoded.ids.astype(tokenizer.dtype)
        files.append(_ids_file(encoded.split), ids.tobytes())
        progress.open_ids += len(ids)
        if encoded.is_last:
          length = np.int64(progress.open_ids)
          files.append(_lengths_file(encoded.split), length.tobytes())
          progress.open_ids = 0
      progress.num_pieces += len(batch)
      report.print()
      if tokenizer.is_resumable and time.monotonic() > saved + _SAVE_SECONDS:
        files.save(progress)
        saved = time.monotonic()
  files.remove_record()
  lengths = {}
  for split in SPLITS:
    path = folder / _lengths_file(split)
    lengths[split] = np.fromfile(path, np.int64)
    path.unlink()
  return WrittenTokens(lengths, dropped["documents"])


def _ids_file(split: str) -> str:
  return f"{split}.bin"


def _lengths_file(split: str) -> str:
  """Return the name of the file of the documents' lengths while they are written."""
  return f"{split}_lengths.partial"


def _pieces(documents: SplitDocuments, dropped: Counter[str]) -> Iterator[Piece]:
  """Yield the pieces of all documents that are not dropped, each followed by an end."""
  for split, contents in documents:
    if split == "dropped":
      dropped["documents"] += 1
      continue
    before = b""
    content = next(contents, None)
    while content is not None:
      following = next(contents, None)
      yield Piece(split, content, before, _start(following or b""))
      before = _end(content)
      content = following
    yield Piece(split, None)


class _Report:
  """Prints progress and the remaining time to stderr, not more often than every few seconds."""

  def __init__(self, total_bytes: int) -> None:
    self._total = total_bytes
    self._done = 0  # bytes that were read
    self._skipped = 0  # bytes of them that an earlier process has tokenized
    self._began = time.monotonic()
    self._printed = self._began

  def count(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield the pieces, and count their bytes."""
    for piece in pieces:
      self._done += len(piece.content or b"")
      yield piece

  def start(self, *, resumes: bool) -> None:
    """Start the clock after the pieces that an earlier process has tokenized."""
    self._skipped = self._done
    self._began = time.monotonic()
    if resumes:
      write_line(f"tokenizing resumes after {self._done / 1e6:,.0f} MB")

  def print(self) -> None:
    now = time.monotonic()
    if now < self._printed + _REPORT_SECONDS:
      return
    self._printed = now
    own_bytes = max(self._done - self._skipped, 1)
    speed = own_bytes / (now - self._began)
    progress = f"{self._done / 1e6:,.0f}"
    if self._total:
      left_bytes = max(self._total - self._done, 0)
      left = datetime.timedelta(seconds=round(left_bytes / speed))
      progress += f" of {self._total / 1e6:,.0f} MB, {left} left"
    else:
      progress += " MB"
    write_line(f"tokenizing: {progress}, {speed / 1e6:.1f} MB/s")
