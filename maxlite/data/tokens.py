"""Documents tokenized once and kept on disk, found again by what they were made from.

A folder holds, for `train` and `eval`, NAME.bin (the ids of all documents, each bos + text + eos)
and NAME_lengths.npy (ids per document), and meta.json. It is written under another name and moved
into place when complete, so processes may race for it and may be killed at any time.
"""

import array
import dataclasses
import hashlib
import json
import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.split import Assigned, Reader, split_documents
from maxlite.data.tokenizer import Tokenizer

SPLITS = ("train", "eval")
_FORMAT = 1
_LEFTOVER_SECONDS = 3600.0

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tokens:
  """One split on disk; `digest` changes when any id or length would."""

  path: Path
  dtype: np.dtype
  digest: str
  lengths: np.ndarray


@dataclasses.dataclass(frozen=True)
class TokenizedData:
  """Both splits; `num_dropped` training documents were left out for being held-out ones."""

  train: Tokens
  eval: Tokens
  num_dropped: int


def open_tokens(
  cfg: DataConfig,
  read: Reader,
  files: list[Path],
  eval_files: list[Path],
  *,
  tokenizer: Tokenizer,
  cache_directory: Path,
) -> TokenizedData:
  """The tokenized files, from the cache if it has them, tokenizing them first otherwise."""
  folder = cache_directory / _key(cfg, files, eval_files, tokenizer)
  meta = _read_meta(folder)
  if meta is None:
    _tokenize(split_documents(cfg, read, files, eval_files), tokenizer, folder)
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
  return TokenizedData(train, held_out, meta["num_dropped"])


def _key(cfg: DataConfig, files: list[Path], eval_files: list[Path], tokenizer: Tokenizer) -> str:
  facts = (
    _FORMAT,
    tokenizer.identity,
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


def _tokenize(documents: Assigned, tokenizer: Tokenizer, folder: Path) -> None:
  _remove_leftovers(folder.parent)
  log.info("tokenizing once into %s", folder)
  partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
  partial.mkdir(parents=True)
  try:
    _write(documents, tokenizer, partial)
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


def _write(documents: Assigned, tokenizer: Tokenizer, folder: Path) -> None:
  dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
  writers = {name: _SplitWriter(folder, name, tokenizer, dtype) for name in SPLITS}
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
  meta = {"dtype": dtype.str, "digests": digests, "num_dropped": num_dropped, "sizes": sizes}
  (folder / "meta.json").write_text(json.dumps(meta))


class _SplitWriter:
  """Appends documents to NAME.bin; memory grows by 8 bytes per document."""

  def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    self._lengths_path = folder / f"{name}_lengths.npy"
    self._file = (folder / f"{name}.bin").open("wb", buffering=1 << 20)
    self._tokenizer, self._dtype = tokenizer, dtype
    self._lengths = array.array("q")
    self._digest = hashlib.blake2b(digest_size=16)

  def add(self, pieces: Iterator[bytes]) -> None:
    length = self._append([self._tokenizer.bos])
    for piece in pieces:
      length += self._append(self._tokenizer.encode(piece))
    length += self._append([self._tokenizer.eos])
    self._lengths.append(length)

  def _append(self, ids: list[int] | np.ndarray) -> int:
    data = np.asarray(ids).astype(self._dtype).tobytes()
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
