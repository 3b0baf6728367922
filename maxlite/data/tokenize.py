"""Tokenization to files, on all cores, with progress, resumable after a kill.

Documents are read once, in order, in pieces. Batches of pieces are encoded by the tokenizer's
library on all cores and appended to the files of their split. Every few seconds sizes.json records
how many pieces are in the files, and their sizes; a later process cuts the files to there, reads
past those pieces and continues with the next.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from maxlite.config.file_io import write_atomically
from maxlite.data.split import SplitDocuments
from maxlite.data.tokenizer import Tokenizer

SPLITS = ("train", "eval")
BATCH_BYTES = 3 << 19  # encoded at once
_SAVE_SECONDS, _REPORT_SECONDS = 5.0, 10.0
_PROGRESS = "sizes.json"
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


@dataclasses.dataclass
class _Progress:
  """What the files of the splits hold."""

  num_pieces: int = 0
  open_ids: int = 0  # of the document that the last piece did not end
  sizes: dict[str, int] = dataclasses.field(default_factory=dict)  # [bytes] of the files by name


def write_tokens(
  documents: SplitDocuments, tokenizer: DocumentTokenizer, folder: Path, total_bytes: int
) -> tuple[dict[str, np.ndarray], int]:
  """Write the ids of each split to `folder`/SPLIT.bin, after what an earlier process has written.

  Args:
    total_bytes: of the text, to estimate the remaining time; 0: unknown.

  Returns:
    The number of ids of each document by split, and the number of documents dropped.
  """
  done = _read_progress(folder)
  dropped, report = Counter[str](), _Report(total_bytes)
  pieces = report.count(_pieces(documents, dropped))
  for _ in itertools.islice(pieces, done.num_pieces):
    pass
  report.start(resumes=done.num_pieces > 0)
  saved = time.monotonic()
  with contextlib.ExitStack() as stack:
    opened = lambda path: stack.enter_context(path.open("ab", buffering=1 << 20))
    files = {name: list(map(opened, _paths(folder, name))) for name in SPLITS}
    for batch in tokenizer.encode(pieces, is_open=done.open_ids > 0):
      for name, ids, is_last in batch:
        files[name][0].write(ids.astype(tokenizer.dtype).tobytes())
        done.open_ids += len(ids)
        if is_last:
          files[name][1].write(np.int64(done.open_ids).tobytes())
          done.open_ids = 0
      done.num_pieces += len(batch)
      report.print()
      if tokenizer.is_resumable and time.monotonic() > saved + _SAVE_SECONDS:
        for file in itertools.chain(*files.values()):
          file.flush()
          os.fsync(file.fileno())
          done.sizes[Path(file.name).name] = file.tell()
        write_atomically(folder / _PROGRESS, json.dumps(dataclasses.asdict(done)))
        saved = time.monotonic()
  (folder / _PROGRESS).unlink(missing_ok=True)
  lengths = {name: np.fromfile(_paths(folder, name)[1], np.int64) for name in SPLITS}
  for name in SPLITS:
    _paths(folder, name)[1].unlink()
  return lengths, dropped["documents"]


def _paths(folder: Path, name: str) -> tuple[Path, Path]:
  """The files of the ids and, while they are written, of the documents' lengths."""
  return folder / f"{name}.bin", folder / f"{name}_lengths.partial"


def _read_progress(folder: Path) -> _Progress:
  """Read how far an earlier process came, and cut or create the files accordingly."""
  done = _Progress()
  if (folder / _PROGRESS).exists():
    done = _Progress(**json.loads((folder / _PROGRESS).read_bytes()))
  for path in (path for name in SPLITS for path in _paths(folder, name)):
    path.touch()
    os.truncate(path, done.sizes.get(path.name, 0))
  return done


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
