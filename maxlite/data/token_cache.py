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
import json
import os
import shutil
import time
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from maxlite.config.schema import DataConfig
from maxlite.data.split import Reader, SplitDocuments, split_documents
from maxlite.data.tokenize import SPLITS, DocumentTokenizer, write_tokens
from maxlite.errors import UserError, get_logger
from maxlite.storage.file_io import open_regular, require_regular_files, write_atomically
from maxlite.storage.object_store import (
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

LOSS_MASK_BIT = np.uint32(1 << 31)  # set in ids of conversations that count in the loss
_FORMAT = 2
_STALE_SECONDS = 24 * 3600.0
_META = "meta.json"
_LOCK = ".lock"
_PACKED = (".gz", ".zst", ".parquet", ".arrow", ".array_record")  # size is not the text's
_LOCAL_COPIES = Path("~/.cache/maxlite/tokens")  # of caches on object stores

log = get_logger(__name__)


class IdReader(Protocol):
  """Ids on disk, read on access; worker processes get copies."""

  def read(self, offset: int, count: int) -> np.ndarray:
    """Read ids [offset, offset + count)."""


@dataclasses.dataclass(frozen=True)
class Tokens:
  """The documents of one split, on disk; `digest` changes if any id or length does."""

  file: IdReader
  digest: str
  offsets: np.ndarray  # first id of each document in the file
  lengths: np.ndarray  # ids of each document

  @staticmethod
  def contiguous(file: IdReader, digest: str, lengths: np.ndarray) -> "Tokens":
    """Return documents that follow each other from the start of a file."""
    return Tokens(file, digest, np.cumsum(lengths) - lengths, lengths)


@dataclasses.dataclass(frozen=True)
class TokenizedData:
  """Both splits; `num_dropped` training documents were dropped as duplicates of held-out ones.

  `counts` are from the DocumentTokenizer. `files` is a report of the files that were read.
  """

  train: Tokens
  eval: Tokens
  num_dropped: int
  counts: dict[str, int]
  files: str = ""


class SplitFiles(NamedTuple):
  """The files of a split."""

  ids: Path
  lengths: Path


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
  key = cache_key(cfg, files, eval_files, tokenizer)
  sources = [*files, *eval_files]
  shared = ""  # URI of the cache on an object store
  folder = Path(cache_directory) / key
  if is_remote(cache_directory):
    shared = join(cache_directory, key)
    folder = _LOCAL_COPIES.expanduser() / key
  damage = cache_damage(folder, sources)
  if damage and shared and _META in list_names(shared):
    _download_folder(shared, folder, sources)
    damage = cache_damage(folder, sources)
  if damage:
    if folder.exists():
      log.warning("%s is rebuilt: %s", shared or folder, damage)
    documents = split_documents(cfg, read, files, eval_files)
    write_cache(documents, tokenizer, folder, sources)
    damage = cache_damage(folder, sources)
    if damage:
      raise UserError(f"{folder} has just been written: {damage}: check the disk")
    if shared:
      _upload_folder(folder, shared)
  return read_cache(folder, tokenizer.dtype)


def _download_folder(shared: str, folder: Path, sources: list[DataFile]) -> None:
  """Copy a cache on an object store to this machine."""
  with _new_folder(folder, sources) as partial:
    for file in list_files(shared):
      download(file.uri, partial / file.name)


def _upload_folder(folder: Path, shared: str) -> None:
  """Copy a cache to an object store; the file that makes it complete comes last."""
  uploads = []
  for file in [*_all_split_files(folder), folder / _META]:
    uploads.append((file, join(shared, file.name)))
  upload(uploads)


def read_cache(folder: Path, dtype: np.dtype) -> TokenizedData:
  """Read a valid cache; the ids remain on disk."""
  meta = json.loads((folder / _META).read_bytes())
  tokens = {}
  for name in SPLITS:
    files = _split_files(folder, name)
    tokens[name] = Tokens.contiguous(
      TokenFile(files.ids, dtype), meta["digests"][name], np.load(files.lengths)
    )
  return TokenizedData(
    train=tokens["train"],
    eval=tokens["eval"],
    num_dropped=meta["num_dropped"],
    counts=meta["counts"],
  )


def cache_key(
  cfg: DataConfig,
  files: list[DataFile],
  eval_files: list[DataFile],
  tokenizer: DocumentTokenizer,
) -> str:
  """Return the name of the folder, a hash of everything the tokens depend on."""
  fingerprint: list[object] = [
    _FORMAT,
    tokenizer.identity,
    [cfg.dataset_type, cfg.text_column, cfg.eval_split, cfg.eval_fraction],
  ]
  if cfg.on_bad_row == "skip":  # data without a bad row are the same under either policy
    fingerprint.append("on_bad_row=skip")
  if cfg.data_columns:
    fingerprint.append(["data_columns", sorted(cfg.data_columns.items())])
  fingerprint.append(_versions(files))
  fingerprint.append(_versions(eval_files))
  return hashlib.blake2b(json.dumps(fingerprint).encode(), digest_size=12).hexdigest()


def _versions(files: list[DataFile]) -> list[tuple[str, int, int | str]]:
  """Return (name, size, version) of each file."""
  versions = []
  for file in files:
    size, version = size_and_version(file)
    versions.append((str(file), size, version))
  return versions


def _split_files(folder: Path, split: str) -> SplitFiles:
  return SplitFiles(
    ids=folder / f"{split}.bin",
    lengths=folder / f"{split}_lengths.npy",
  )


def _all_split_files(folder: Path) -> list[Path]:
  """Return the files of all splits."""
  files: list[Path] = []
  for name in SPLITS:
    files.extend(_split_files(folder, name))
  return files


def cache_damage(folder: Path, sources: list[DataFile]) -> str:
  """Return why the cache of `sources` cannot be used, or "".

  All files are compared with the digests of meta.json if any was touched since the last comparison.
  st_ctime_ns shows that: unlike the time of modification, it cannot be set. Objects have versions.
  """
  verified_path = folder / "verified"
  files: list[DataFile] = [folder / _META, *_all_split_files(folder), *sources]
  try:
    require_regular_files(folder)
    stamp = str([(str(file), _touched(file)) for file in files])
    if verified_path.exists() and verified_path.read_text() == stamp:
      return ""
    changed = _changed_files(folder, sources)
  except Exception as error:  # damaged files can raise anything
    return f"it is incomplete or damaged ({error})"
  if changed:
    return f"{changed[0]} has changed since the cache was written"
  with contextlib.suppress(OSError):  # a folder that cannot be written is compared every time
    write_atomically(verified_path, stamp)
  return ""


def _changed_files(folder: Path, sources: list[DataFile]) -> list[DataFile]:
  """Return the files whose digests differ from meta.json.

  A folder that is incomplete or damaged can raise any exception.
  """
  meta = json.loads((folder / _META).read_bytes())
  source_by_name = {str(file): file for file in sources}
  changed: list[DataFile] = []
  for name, digest in meta.get("sources", {}).items():
    source = source_by_name[name]
    if _digest(source) != digest:
      changed.append(source)
  for name in SPLITS:
    files = _split_files(folder, name)
    lengths = np.load(files.lengths).tobytes()
    if _digest(files.ids, lengths) != meta["digests"][name]:
      changed.append(files.ids)
  return changed


def _touched(file: DataFile) -> int | str:
  """Return what changes whenever a file is written."""
  if isinstance(file, RemoteFile):
    return file.version
  return file.stat().st_ctime_ns


def _digest(file: DataFile, end: bytes = b"") -> str:
  """Return the digest of the content of `file` and `end`; of an object, its version."""
  if isinstance(file, RemoteFile):
    return file.version
  with file.open("rb") as content:
    digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
  digest.update(end)
  return digest.hexdigest()


def write_cache(
  documents: SplitDocuments,
  tokenizer: DocumentTokenizer,
  folder: Path,
  sources: list[DataFile],
) -> None:
  """Write the cache `folder` of the documents in `sources`."""
  log.info("tokenizing once into %s", folder)
  with _new_folder(folder, sources) as partial:
    source_digests = {str(file): _digest(file) for file in sources}
    written = write_tokens(
      documents,
      tokenizer,
      partial,
      total_bytes=_text_bytes(sources),
      source_digests=source_digests,
    )
    digests = {}
    for name in SPLITS:
      files = _split_files(partial, name)
      lengths = written.lengths[name]
      np.save(files.lengths, lengths)
      digests[name] = _digest(files.ids, lengths.tobytes())
    meta = {
      "sources": source_digests,
      "digests": digests,
      "num_dropped": written.num_dropped,
      "counts": tokenizer.counts,
    }
    (partial / _META).write_text(json.dumps(meta))


def _text_bytes(sources: list[DataFile]) -> int:
  """Return the size of the text in `sources`; 0 if the size of a file is not its text's."""
  total = 0
  for file in sources:
    if file.suffix in _PACKED:
      return 0
    size, _ = size_and_version(file)
    total += size
  return total


@contextlib.contextmanager
def _new_folder(folder: Path, sources: list[DataFile]) -> Iterator[Path]:
  """Yield a folder that replaces `folder` unless another process has written it.

  It holds what a killed process has written. While another process writes, it is a separate one.
  """
  partial = folder.with_name(f"{folder.name}.partial")
  _remove_stale(folder.parent, partial)
  partial.mkdir(parents=True, exist_ok=True)
  lock = open_regular(partial / _LOCK, os.O_RDWR | os.O_CREAT)
  try:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process, or a file system without locks
      partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.partial")
      partial.mkdir()
    yield partial
    if folder.exists() and cache_damage(folder, sources):
      shutil.rmtree(folder)
    try:
      partial.rename(folder)
    except OSError:
      if cache_damage(
        folder, sources
      ):  # otherwise another process was first, with the same content
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
    # Another process has just renamed it, or it is no folder.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
      newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
      if partial != kept and time.time() - newest > _STALE_SECONDS:
        shutil.rmtree(partial, ignore_errors=True)


class TokenFile:
  """The ids of a file of integers from byte `start` on."""

  def __init__(self, path: Path, dtype: np.dtype, start: int = 0) -> None:
    self.path = path
    self.dtype = dtype
    self._start = start
    self._open()

  def _open(self) -> None:
    self._file = os.open(self.path, os.O_RDONLY)
    weakref.finalize(self, os.close, self._file)

  def __setstate__(self, state: dict[str, object]) -> None:
    vars(self).update(state)
    self._open()  # a worker process or a copy needs its own file descriptor

  def read(self, offset: int, count: int) -> np.ndarray:
    """Read ids [offset, offset + count)."""
    id_bytes = self.dtype.itemsize
    num_bytes = count * id_bytes
    data = os.pread(self._file, num_bytes, self._start + offset * id_bytes)
    if len(data) != num_bytes:
      raise UserError(
        f"{self.path} was cut short: restore it, or remove the folder of a token cache, and start "
        "again"
      )
    return np.frombuffer(data, self.dtype)
