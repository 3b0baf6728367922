"""Assignment of documents to the training and evaluation splits."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from maxlite.config.schema import DataConfig
from maxlite.storage.object_store import DataFile

# (file, column, start, stop, reject) -> the documents in the fraction [start, stop) of a file, each
# as an iterator over pieces, which must be consumed before the next document is requested.
Reader = Callable[..., Iterator[Iterator[bytes]]]
# (split, pieces) of each document.
SplitDocuments: TypeAlias = Iterator[tuple[str, Iterator[bytes]]]


class Document(NamedTuple):
  """A document that is not empty."""

  first_piece: bytes
  pieces: Iterator[bytes]  # all of its pieces, the first included


def content_hash(first_piece: bytes) -> int:
  """Return a 64-bit hash of a document's first piece."""
  digest = hashlib.blake2b(first_piece, digest_size=8).digest()
  return int.from_bytes(digest, "big")


def split_documents(
  cfg: DataConfig,
  read: Reader,
  files: list[DataFile],
  eval_files: list[DataFile],
) -> SplitDocuments:
  """Yield (`train`, `eval` or `dropped`, pieces) for every non-empty document.

  A split by content puts equal documents on the same side. With `eval_files`, training documents
  that also occur in them are dropped. `eval_split=tail` cuts by position only, so text that occurs
  twice may be on both sides.
  """
  documents = functools.partial(_documents, read, cfg.text_column)
  if eval_files:
    held_out = set()
    for document in documents(eval_files):
      held_out.add(content_hash(document.first_piece))
      yield "eval", document.pieces
    for document in documents(files):
      if content_hash(document.first_piece) in held_out:
        yield "dropped", document.pieces
      else:
        yield "train", document.pieces
  elif cfg.eval_split == "tail":
    cut = 1 - cfg.eval_fraction
    for document in documents(files, start=0.0, stop=cut):
      yield "train", document.pieces
    for document in documents(files, start=cut, stop=1.0):
      yield "eval", document.pieces
  else:
    limit = cfg.eval_fraction * 2**64
    for document in documents(files):
      if content_hash(document.first_piece) < limit:
        yield "eval", document.pieces
      else:
        yield "train", document.pieces


def _documents(
  read: Reader,
  column: str,
  files: list[DataFile],
  start: float = 0,
  stop: float = 1,
) -> Iterator[Document]:
  """Yield the documents that are not empty in the fraction [start, stop) of each file."""
  for file in files:
    for pieces in read(file, column, start, stop):
      first = next(pieces, b"")
      if first:
        yield Document(first, itertools.chain([first], pieces))
