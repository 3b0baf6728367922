"""Documents tokenized once and kept on disk, found again by what they were made from.

A folder holds, for `train` and `eval`, NAME.bin (the ids of all documents) and NAME_lengths.npy
(ids per document), and meta.json. It is written under another name and moved
into place when complete, so processes may race for it and may be killed at any time.
"""

import array
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.schema import DataConfig
from maxlite.data.sources.split import Assigned, Reader, split_documents
from maxlite.data.tokenizers.tokenizer import Tokenizer

SPLITS = ("train", "eval")
_FORMAT = 2
_LEFTOVER_SECONDS = 3600.0

log = logging.getLogger(__name__)


class Encoder(Protocol):
  """How what was read becomes documents of ids; `identity` changes when any id would.

  `counts` tells of documents that were changed or left out, by what was done to them.
  """

  identity: str
  dtype: np.dtype
  counts: Counter[str]

  def encode(self, pieces: Iterator[bytes]) -> Iterator[Iterator[np.ndarray]]:
    """The documents, often one, that one that was read becomes: each in parts of its ids."""


class Texts:
  """Documents of text: bos, the text and eos."""

  def __init__(self, tokenizer: Tokenizer) -> None:
    self._tokenizer, self.identity = tokenizer, tokenizer.identity
    self.dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    self.counts: Counter[str] = Counter()

  def encode(self, pieces: Iterator[bytes]) -> Iterator[Iterator[np.ndarray]]:
    yield self._parts(pieces)

  def _parts(self, pieces: Iterator[bytes]) -> Iterator[np.ndarray]:
    yield np.asarray([self._tokenizer.bos])
    yield from map(self._tokenizer.encode, pieces)
    yield np.asarray([self._tokenizer.eos])


@dataclasses.dataclass(frozen=True)
class Tokens:
  """One split on disk; `digest` changes when any id or length would."""

  path: Path
  dtype: np.dtype
  digest: str
  lengths: np.ndarray


@dataclasses.dataclass(frozen=True)
class TokenizedData:
  """Both splits; `num_dropped` training documents were left out for being held-out ones.

  `counts` are the encoder's.
  """

  train: Tokens
  eval: Tokens
  num_dropped: int
  counts: dict[str, int]


def open_tokens(
  cfg: DataConfig,
  read: Reader,
  files: list[Path],
  eval_files: list[Path],
  *,
  encoder: Encoder,
  cache_directory: Path,
) -> TokenizedData:
  """The tokenized files, from the cache if it has them, tokenizing them first otherwise."""
  folder = cache_directory / _key(cfg, files, eval_files, encoder)
  meta = _read_meta(folder)
  if meta is None:
    _tokenize(split_documents(cfg, read, files, eval_files), encoder, folder)
    meta = _read_meta(folder)
    assert meta is not None
  train, held_out = (
    Tokens(
      folder / f"{name}.bin",
      np.dtype(meta["dtype"]),
      meta["digests"][name],
      np.load(folder / f"{name}_lengths.npy"),
    )
    for name in SPLITS
  )
  return TokenizedData(train, held_out, meta["num_dropped"], meta["counts"])


def _key(cfg: DataConfig, files: list[Path], eval_files: list[Path], encoder: Encoder) -> str:
  facts = (
    _FORMAT,
    encoder.identity,
    [cfg.dataset_type, cfg.text_column, cfg.eval_split, cfg.eval_fraction],
    *([(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in fs] for fs in (files, eval_files)),
  )
  return hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()


def _read_meta(folder: Path) -> dict[str, Any] | None:
  """meta.json of a complete folder; None where anything is missing or of another size."""
  try:
    meta = json.loads((folder / "meta.json").read_bytes())
    complete = all((folder / name).stat().st_size == size for name, size in meta["sizes"].items())
  except (OSError, ValueError):
    return None
  return meta if complete else None


def _tokenize(documents: Assigned, encoder: Encoder, folder: Path) -> None:
  _remove_leftovers(folder.parent)
  log.info("tokenizing once into %s", folder)
  partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
  partial.mkdir(parents=True)
  try:
    _write(documents, encoder, partial)
    _publish(partial, folder)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(cache_directory: Path) -> None:
  """Removes what killed processes left behind: partial folders nobody has written to for long."""
  for partial in cache_directory.glob("*.partial"):
    newest = max((f.stat().st_mtime for f in (partial, *partial.iterdir())), default=0.0)
    if time.time() - newest > _LEFTOVER_SECONDS:
      shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, folder: Path) -> None:
  if folder.exists() and _read_meta(folder) is None:
    log.warning("%s is damaged and made anew", folder)
    shutil.rmtree(folder)
  try:
    partial.rename(folder)
  except OSError:
    if _read_meta(folder) is None:  # else another process was first, with the same content
      raise


def _write(documents: Assigned, encoder: Encoder, folder: Path) -> None:
  writers = {name: _SplitWriter(folder, name, encoder) for name in SPLITS}
  num_dropped = 0
  try:
    for name, pieces in documents:
      if name == "dropped":
        num_dropped += 1
      else:
        writers[name].add(pieces)
  finally:
    digests = {name: writer.close() for name, writer in writers.items()}
  sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
  meta = {"dtype": encoder.dtype.str, "digests": digests, "num_dropped": num_dropped}
  meta |= {"counts": encoder.counts, "sizes": sizes}
  (folder / "meta.json").write_text(json.dumps(meta))


class _SplitWriter:
  """Appends documents to NAME.bin; memory grows by 8 bytes per document."""

  def __init__(self, folder: Path, name: str, encoder: Encoder) -> None:
    self._lengths_path = folder / f"{name}_lengths.npy"
    self._file = (folder / f"{name}.bin").open("wb", buffering=1 << 20)
    self._encoder = encoder
    self._lengths = array.array("q")
    self._digest = hashlib.blake2b(digest_size=16)

  def add(self, pieces: Iterator[bytes]) -> None:
    for document in self._encoder.encode(pieces):
      self._lengths.append(sum(map(self._append, document)))

  def _append(self, ids: np.ndarray) -> int:
    data = ids.astype(self._encoder.dtype).tobytes()
    self._file.write(data)
    self._digest.update(data)
    return len(ids)

  def close(self) -> str:
    """The digest of all that was added."""
    self._file.close()
    lengths = np.asarray(self._lengths, np.int64)
    np.save(self._lengths_path, lengths)
    self._digest.update(lengths.tobytes())
    return self._digest.hexdigest()


class TokenFile:
  """The ids of a split, read from the disk as they are needed."""

  def __init__(self, tokens: Tokens) -> None:
    self._path, self._dtype = tokens.path, tokens.dtype
    self._open()

  def _open(self) -> None:
    self._file = os.open(self._path, os.O_RDONLY)
    weakref.finalize(self, os.close, self._file)

  def __setstate__(self, state: dict) -> None:
    vars(self).update(state)
    self._open()  # a worker process, or a copy, has its own file descriptor

  def read(self, offset: int, count: int) -> np.ndarray:
    """`count` ids from the `offset`-th on."""
    size = self._dtype.itemsize
    data = os.pread(self._file, count * size, offset * size)
    if len(data) != count * size:
      raise UserError(f"{self._path} was cut short: remove its folder and start again")
    return np.frombuffer(data, self._dtype)
