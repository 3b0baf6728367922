"""A cache of tokenized documents on disk.

The folder's name is a hash of everything the tokens depend on. For each split it holds NAME.bin
(the ids of all documents), NAME_lengths.npy (ids per document), and one meta.json with digests of
them and of the tokenized files. A cache is written under a temporary name and renamed when
complete, so processes may write it concurrently and may be killed at any time.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import itertools
import json
import logging
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from maxlite.config.errors import UserError
from maxlite.config.file_io import write_atomically
from maxlite.config.object_store import (
  AnyPath,
  DataFile,
  RemoteFile,
  download,
  is_remote,
  join,
  list_files,
  list_names,
  size_and_version,
  upload,
)
from maxlite.config.schema import DataConfig
from maxlite.data.split import Reader, SplitDocuments, split_documents
from maxlite.data.tokenize import SPLITS, DocumentTokenizer, write_tokens

LOSS_MASK_BIT = np.uint32(1 << 31)  # set in ids of conversations that count in the loss
_FORMAT = 2
_STALE_SECONDS = 24 * 3600.0
_META, _LOCK = "meta.json", ".lock"
_PACKED = (".gz", ".zst", ".parquet", ".arrow", ".array_record")  # size is not that of their text
_LOCAL_COPIES = Path("~/.cache/maxlite/tokens")  # of caches on object stores

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tokens:
  """One split on disk; `digest` changes if any id or length does."""

  path: Path
  dtype: np.dtype
  digest: str
  lengths: np.ndarray  # ids per document


@dataclasses.dataclass(frozen=True)
class TokenizedData:
  """Both splits; `num_dropped` training documents were dropped as duplicates of held-out ones."""

  train: Tokens
  eval: Tokens
  num_dropped: int
  counts: dict[str, int]  # of the DocumentTokenizer
  files: str = ""  # a report of the files that were read


def open_tokens(
  cfg: DataConfig,
  read: Reader,
  files: list[DataFile],
  eval_files: list[DataFile],
  tokenizer: DocumentTokenizer,
  cache_directory: AnyPath,
) -> TokenizedData:
  """Open the tokenized files, tokenizing them first if the cache does not hold them.

  A cache on an object store is copied to this machine: from there, or to there.
  """
  key, sources = _key(cfg, files, eval_files, tokenizer), [*files, *eval_files]
  shared = join(cache_directory, key) if is_remote(cache_directory) else ""
  folder = (_LOCAL_COPIES.expanduser() if shared else Path(cache_directory)) / key
  damage = _damage(folder, sources)
  if damage and shared and _META in list_names(shared):
    with _new_folder(folder, sources) as partial:
      for file in list_files(shared):
        download(file.uri, partial / file.name)
    damage = _damage(folder, sources)
  if damage:
    if folder.exists():
      log.warning("%s is rebuilt: %s", shared or folder, damage)
    _tokenize(split_documents(cfg, read, files, eval_files), tokenizer, folder, sources)
    if damage := _damage(folder, sources):
      raise UserError(f"{folder} has just been written: {damage}: check the disk")
    if shared:  # the file that makes it complete comes last
      written = (*itertools.chain(*_split_files(folder).values()), folder / _META)
      upload((file, join(shared, file.name)) for file in written)
  meta = json.loads((folder / _META).read_bytes())
  train, held_out = (
    Tokens(path, tokenizer.dtype, meta["digests"][name], np.load(lengths_path))
    for name, (path, lengths_path) in _split_files(folder).items()
  )
  return TokenizedData(train, held_out, meta["num_dropped"], meta["counts"])


def _key(
  cfg: DataConfig, files: list[DataFile], eval_files: list[DataFile], tokenizer: DocumentTokenizer
) -> str:
  facts = (
    _FORMAT,
    tokenizer.identity,
    [cfg.dataset_type, cfg.text_column, cfg.eval_split, cfg.eval_fraction],
    # Data without a bad row are the same under either policy, and older caches lack it.
    *(["on_bad_row=skip"] if cfg.on_bad_row == "skip" else []),
    *([(str(f), *size_and_version(f)) for f in fs] for fs in (files, eval_files)),
  )
  return hashlib.blake2b(json.dumps(facts).encode(), digest_size=12).hexdigest()


def _split_files(folder: Path) -> dict[str, tuple[Path, Path]]:
  """The files of the ids and of the lengths of each split."""
  return {name: (folder / f"{name}.bin", folder / f"{name}_lengths.npy") for name in SPLITS}


def _damage(folder: Path, sources: list[DataFile]) -> str:
  """Return why the cache of `sources` cannot be used, or "".

  All files are compared with the digests of meta.json if any was touched since the last comparison.
  st_ctime_ns shows that: unlike the time of modification, it cannot be set. Objects have versions.
  """
  meta_path, verified_path, splits = folder / _META, folder / "verified", _split_files(folder)
  files = [meta_path, *itertools.chain(*splits.values()), *sources]
  try:
    stamp = str([(str(file), _touched(file)) for file in files])
    if verified_path.exists() and verified_path.read_text() == stamp:
      return ""
    meta = json.loads(meta_path.read_bytes())
    by_name, digests = {str(file): file for file in sources}, meta.get("sources", {})
    changed = [by_name[name] for name in digests if _digest(by_name[name]) != digests[name]]
    for name, (path, lengths_path) in splits.items():
      if _digest(path, np.load(lengths_path).tobytes()) != meta["digests"][name]:
        changed.append(path)
  except Exception as error:  # damaged files can raise anything
    return f"it is incomplete or damaged ({error})"
  if changed:
    return f"{changed[0]} has changed since the cache was written"
  with contextlib.suppress(OSError):  # a folder that cannot be written is compared every time
    write_atomically(verified_path, stamp)
  return ""


def _touched(file: DataFile) -> int | str:
  return file.version if isinstance(file, RemoteFile) else file.stat().st_ctime_ns


def _digest(file: DataFile, end: bytes = b"") -> str:
  """The digest of the content of `file` and `end`; of an object, its version."""
  if isinstance(file, RemoteFile):
    return file.version
  with file.open("rb") as content:
    digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
  digest.update(end)
  return digest.hexdigest()


def _tokenize(
  documents: SplitDocuments, tokenizer: DocumentTokenizer, folder: Path, sources: list[DataFile]
) -> None:
  log.info("tokenizing once into %s", folder)
  is_text = not any(file.suffix in _PACKED for file in sources)
  total_bytes = sum(size_and_version(file)[0] for file in sources) if is_text else 0
  with _new_folder(folder, sources) as partial:
    source_digests = {str(file): _digest(file) for file in sources}
    lengths, num_dropped = write_tokens(documents, tokenizer, partial, total_bytes, source_digests)
    digests = {}
    for name, (path, lengths_path) in _split_files(partial).items():
      np.save(lengths_path, lengths[name])
      digests[name] = _digest(path, lengths[name].tobytes())
    meta = {"sources": source_digests, "digests": digests, "num_dropped": num_dropped}
    (partial / _META).write_text(json.dumps(meta | {"counts": tokenizer.counts}))


@contextlib.contextmanager
def _new_folder(folder: Path, sources: list[DataFile]) -> Iterator[Path]:
  """Yield a folder that replaces `folder` unless another process has written it.

  It holds what a killed process has written. While another process writes, it is a separate one.
  """
  partial = folder.with_name(f"{folder.name}.partial")
  _remove_stale(folder.parent, partial)
  partial.mkdir(parents=True, exist_ok=True)
  lock = os.open(partial / _LOCK, os.O_RDWR | os.O_CREAT)
  try:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process, or a file system without locks
      partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
      partial.mkdir()
    yield partial
    if folder.exists() and _damage(folder, sources):
      shutil.rmtree(folder)
    try:
      partial.rename(folder)
    except OSError:
      if _damage(folder, sources):  # otherwise another process was first, with the same content
        raise
      shutil.rmtree(partial)
    # Only now: until here, another process must not write to this folder.
    (folder / _LOCK).unlink(missing_ok=True)
  except Exception:
    shutil.rmtree(partial, ignore_errors=True)
    raise
  finally:
    os.close(lock)


def _remove_stale(cache_directory: Path, kept: Path) -> None:
  """Remove partial folders of killed processes, recognized by their last modification."""
  for partial in cache_directory.glob("*.partial"):
    with contextlib.suppress(FileNotFoundError):  # another process has just renamed it
      newest = max(f.stat().st_mtime for f in (partial, *partial.iterdir()))
      if partial != kept and time.time() - newest > _STALE_SECONDS:
        shutil.rmtree(partial, ignore_errors=True)


class TokenFile:
  """The ids of a split, read from disk on access."""

  def __init__(self, tokens: Tokens) -> None:
    self._path, self._dtype = tokens.path, tokens.dtype
    self._open()

  def _open(self) -> None:
    self._file = os.open(self._path, os.O_RDONLY)
    weakref.finalize(self, os.close, self._file)

  def __setstate__(self, state: dict) -> None:
    vars(self).update(state)
    self._open()  # a worker process or a copy needs its own file descriptor

  def read(self, offset: int, count: int) -> np.ndarray:
    """Read ids [offset, offset + count)."""
    size = self._dtype.itemsize
    data = os.pread(self._file, count * size, offset * size)
    if len(data) != count * size:
      raise UserError(f"{self._path} was cut short: remove its folder and start again")
    return np.frombuffer(data, self._dtype)
