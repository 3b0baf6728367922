"""Tokenization to files, on all cores, with progress, resumable after a kill.

Documents are read once, in order, in pieces. Batches of pieces are encoded by the tokenizer's
library on all cores and appended to the files of their split. Every few seconds the number of
pieces in the files is recorded (`PartialFiles`); a later process reads past those pieces and
continues with the next.
"""

import datetime
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from maxlite.data.partial_files import PartialFiles
from maxlite.data.split import SplitDocuments
from maxlite.data.tokenizer import Tokenizer

SPLITS = ("train", "eval")
BATCH_BYTES = 3 << 19  # encoded at once
_SAVE_SECONDS, _REPORT_SECONDS = 5.0, 10.0
Piece = tuple[str, bytes | None]  # split, bytes of a document or None at its end
Encoded = tuple[str, np.ndarray, bool]  # split, ids, whether they end a document


class DocumentTokenizer(Protocol):
  """Converts what a reader yields to documents of ids.

  `identity` changes if any id does. `counts` has the documents that were changed or left out, by
  reason. `is_resumable`: whether ids depend on their piece alone, and `counts` on none.
  """

  identity: str
  dtype: np.dtype
  counts: Counter[str]
  is_resumable: bool

  def encode(self, pieces: Iterator[Piece], *, is_open: bool) -> Iterator[list[Encoded]]:
    """Yield the ids of consecutive pieces in batches; a document may become several, or none.

    Args:
      is_open: whether the first piece continues a document.
    """


class TextTokenizer:
  """Text documents: bos, the text, eos."""

  is_resumable = True

  def __init__(self, tokenizer: Tokenizer) -> None:
    self._tokenizer, self.identity = tokenizer, tokenizer.identity
    self.dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    self.counts: Counter[str] = Counter()
    self._bos, self._eos = (np.asarray([i], self.dtype) for i in (tokenizer.bos, tokenizer.eos))

  def encode(self, pieces: Iterator[Piece], *, is_open: bool) -> Iterator[list[Encoded]]:
    """Yield the ids of consecutive pieces, an entry for each."""
    for batch in _batches(pieces):
      texts = [piece for _, piece in batch if piece is not None]
      ids, encoded = iter(self._tokenizer.encode_batch(texts)), []
      for name, piece in batch:
        is_last = piece is None
        own = self._eos if is_last else next(ids)
        encoded.append((name, own if is_open else np.concatenate([self._bos, own]), is_last))
        is_open = not is_last
      yield encoded


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
  batch: list[Piece] = []
  size = 0
  for name, piece in pieces:
    batch.append((name, piece))
    size += len(piece or b"") + 64  # of a Python object
    if size >= BATCH_BYTES:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


def write_tokens(
  documents: SplitDocuments,
  tokenizer: DocumentTokenizer,
  folder: Path,
  total_bytes: int,
  source_digests: Mapping[str, str],
) -> tuple[dict[str, np.ndarray], int]:
  """Write the ids of each split to `folder`/SPLIT.bin, after what an earlier process has written.

  Args:
    total_bytes: of the text, to estimate the remaining time; 0: unknown.
    source_digests: digest of each file of the text, by name.

  Returns:
    The number of ids of each document by split, and the number of documents dropped.
  """
  dropped = Counter[str]()
  report = _Report(total_bytes)
  pieces = report.count(_pieces(documents, dropped))
  names = [name for split in SPLITS for name in (_ids_file(split), _lengths_file(split))]
  files = PartialFiles(folder, names, source_digests)
  with files.open() as progress:
    for _ in itertools.islice(pieces, progress.num_pieces):
      pass
    report.start(resumes=progress.num_pieces > 0)
    saved = time.monotonic()
    for batch in tokenizer.encode(pieces, is_open=progress.open_ids > 0):
      for split, ids, is_last in batch:
        files.append(_ids_file(split), ids.astype(tokenizer.dtype).tobytes())
        progress.open_ids += len(ids)
        if is_last:
          files.append(_lengths_file(split), np.int64(progress.open_ids).tobytes())
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
  return lengths, dropped["documents"]


def _ids_file(split: str) -> str:
  return f"{split}.bin"


def _lengths_file(split: str) -> str:
  """The lengths of the documents while they are written."""
  return f"{split}_lengths.partial"


def _pieces(documents: SplitDocuments, dropped: Counter[str]) -> Iterator[Piece]:
  """Yield the pieces of all documents that are not dropped, each followed by an end."""
  for name, pieces in documents:
    if name == "dropped":
      dropped["documents"] += 1
      continue
    yield from ((name, piece) for piece in pieces)
    yield name, None


class _Report:
  """Prints progress and the remaining time to stderr, not more often than every few seconds."""

  def __init__(self, total_bytes: int) -> None:
    self._total, self._done, self._skipped = total_bytes, 0, 0
    self._began = self._printed = time.monotonic()

  def count(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
    for piece in pieces:
      self._done += len(piece[1] or b"")
      yield piece

  def start(self, *, resumes: bool) -> None:
    self._skipped, self._began = self._done, time.monotonic()
    if resumes:
      sys.stderr.write(f"tokenizing resumes after {self._done / 1e6:,.0f} MB\n")

  def print(self) -> None:
    now = time.monotonic()
    if now < self._printed + _REPORT_SECONDS:
      return
    self._printed = now
    speed = max(self._done - self._skipped, 1) / (now - self._began)
    left = datetime.timedelta(seconds=round(max(self._total - self._done, 0) / speed))
    of = f" of {self._total / 1e6:,.0f} MB, {left} left" if self._total else " MB"
    sys.stderr.write(f"tokenizing: {self._done / 1e6:,.0f}{of}, {speed / 1e6:.1f} MB/s\n")
