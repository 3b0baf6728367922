"""Assignment of documents to the training and evaluation splits."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator

from maxlite.config.object_store import DataFile
from maxlite.config.schema import DataConfig

# (file, column, start, stop, reject) -> the documents in the fraction [start, stop) of a file, each
# as an iterator over pieces, which must be consumed before the next document is requested.
Reader = Callable[..., Iterator[Iterator[bytes]]]
Document = tuple[bytes, Iterator[bytes]]  # its first piece, and all of its pieces
SplitDocuments = Iterator[tuple[str, Iterator[bytes]]]


def content_hash(first_piece: bytes) -> int:
  """64-bit hash of a document's first piece."""
  return int.from_bytes(hashlib.blake2b(first_piece, digest_size=8).digest(), "big")


def split_documents(
  cfg: DataConfig, read: Reader, files: list[DataFile], eval_files: list[DataFile]
) -> SplitDocuments:
  """Yield (`train`, `eval` or `dropped`, pieces) for every non-empty document.

  A split by content puts equal documents on the same side. With `eval_files`, training documents
  that also occur in them are dropped. `eval_split=tail` cuts by position only, so text that occurs
  twice may be on both sides.
  """
  documents = functools.partial(_documents, read, cfg.text_column)
  if eval_files:
    held_out = set()
    for first, pieces in documents(eval_files):
      held_out.add(content_hash(first))
      yield "eval", pieces
    for first, pieces in documents(files):
      yield ("dropped" if content_hash(first) in held_out else "train"), pieces
  elif cfg.eval_split == "tail":
    cut = 1 - cfg.eval_fraction
    for name, start, stop in (("train", 0.0, cut), ("eval", cut, 1.0)):
      yield from ((name, pieces) for _, pieces in documents(files, start, stop))
  else:
    limit = cfg.eval_fraction * 2**64
    for first, pieces in documents(files):
      yield ("eval" if content_hash(first) < limit else "train"), pieces


def _documents(
  read: Reader, column: str, files: list[DataFile], start: float = 0, stop: float = 1
) -> Iterator[Document]:
  for file in files:
    for pieces in read(file, column, start, stop):
      if first := next(pieces, b""):
        yield first, itertools.chain([first], pieces)
