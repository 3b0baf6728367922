"""Which documents are trained on and which are held out."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from maxlite.config.schema import DataConfig

# (file, column, start, stop) -> the pieces of each document in the share [start, stop) of a file.
# A document's pieces are to be read before the next document is asked for.
Reader = Callable[[Path, str, float, float], Iterator[Iterator[bytes]]]
Document = tuple[bytes, Iterator[bytes]]  # its first piece, and all of its pieces
Assigned = Iterator[tuple[str, Iterator[bytes]]]


def content_hash(first_piece: bytes) -> int:
  """64 bits that documents which begin with the same piece share."""
  return int.from_bytes(hashlib.blake2b(first_piece, digest_size=8).digest(), "big")


def split_documents(
  cfg: DataConfig, read: Reader, files: list[Path], eval_files: list[Path]
) -> Assigned:
  """(`train`, `eval` or `dropped`, pieces) of every document that is not empty.

  By content, documents that are alike land on one side. Where `eval_files` are given, training
  documents that are among them are dropped. The tail is cut by place alone: text that occurs
  twice may be on both sides.
  """
  documents = functools.partial(_documents, read, cfg.text_column)
  if eval_files:
    return _by_file(documents(files), documents(eval_files))
  if cfg.eval_split == "tail":
    cut = 1 - cfg.eval_fraction
    return _by_place(documents(files, 0, cut), documents(files, cut, 1))
  return _by_content(documents(files), cfg.eval_fraction)


def _documents(
  read: Reader, column: str, files: list[Path], start: float = 0, stop: float = 1
) -> Iterator[Document]:
  for file in files:
    for pieces in read(file, column, start, stop):
      if first := next(pieces, b""):
        yield first, itertools.chain([first], pieces)


def _by_file(train: Iterator[Document], held_out: Iterator[Document]) -> Assigned:
  hashes = set()
  for first, pieces in held_out:
    hashes.add(content_hash(first))
    yield "eval", pieces
  for first, pieces in train:
    yield ("dropped" if content_hash(first) in hashes else "train"), pieces


def _by_place(train: Iterator[Document], held_out: Iterator[Document]) -> Assigned:
  for name, documents in (("train", train), ("eval", held_out)):
    for _, pieces in documents:
      yield name, pieces


def _by_content(documents: Iterator[Document], eval_fraction: float) -> Assigned:
  limit = eval_fraction * 2**64
  for first, pieces in documents:
    yield ("eval" if content_hash(first) < limit else "train"), pieces
