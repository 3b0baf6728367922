"""The files of an unfinished tokenization, and the record by which another process continues them.

The record has the digests of the sources and, of each file, the size and the digest of what was in
it. A file may be longer than recorded, since it is written on after the record, but what was
recorded must be there bit by bit. Otherwise the tokenization starts again.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from maxlite.errors import get_logger
from maxlite.storage.file_io import open_regular, write_atomically
from maxlite.storage.json_values import Json, JsonObject

_RECORD = "progress.json"
_BLOCK_BYTES = 1 << 20

log = get_logger(__name__)


@dataclasses.dataclass
class Progress:
  """The position of a tokenization."""

  num_pieces: int = 0
  open_ids: int = 0  # of the document that the last piece did not end


class _ChangedError(Exception):
  """A record, or what it describes, is not as it was written."""


class PartialFiles:
  """Files to which a tokenization appends."""

  def __init__(self, folder: Path, names: Sequence[str], source_digests: Mapping[str, str]) -> None:
    """
    Args:
      source_digests: digest of each file that is tokenized, by name.
    """
    self._record_path = folder / _RECORD
    self._paths = {name: folder / name for name in names}
    self._source_digests = dict(source_digests)
    self._streams: dict[str, BinaryIO] = {}
    self._digests = {name: _new_digest() for name in names}

  @contextlib.contextmanager
  def open(self) -> Iterator[Progress]:
    """Open the files at the position of the yielded progress; 0 if there is nothing to continue."""
    progress = self._restore()
    with contextlib.ExitStack() as stack:
      for name, path in self._paths.items():
        descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND)
        stream = stack.enter_context(os.fdopen(descriptor, "ab", buffering=_BLOCK_BYTES))
        self._streams[name] = stream
      yield progress

  def append(self, name: str, data: bytes) -> None:
    self._streams[name].write(data)
    self._digests[name].update(data)

  def save(self, progress: Progress) -> None:
    """Record `progress` once all that was appended is on disk."""
    files = {}
    for name, stream in self._streams.items():
      stream.flush()
      os.fsync(stream.fileno())
      files[name] = {"size": stream.tell(), "digest": self._digests[name].hexdigest()}
    content = {
      "progress": dataclasses.asdict(progress),
      "sources": self._source_digests,
      "files": files,
    }
    record = {"content": content, "digest": _digest_of(content)}
    write_atomically(self._record_path, json.dumps(record))

  def remove_record(self) -> None:
    self._record_path.unlink(missing_ok=True)

  def _restore(self) -> Progress:
    """Cut the files to what the record says they hold, or to nothing."""
    if self._record_path.exists():
      try:
        return self._continue()
      except _ChangedError as error:
        log.warning("tokenization in %s starts again: %s", self._record_path.parent, error)
    for name, path in self._paths.items():
      write_atomically(path, b"")
      self._digests[name] = _new_digest()
    return Progress()

  def _continue(self) -> Progress:
    content = _read_record(self._record_path)
    if content["sources"] != self._source_digests:
      raise _ChangedError("the data have changed")
    for name, path in self._paths.items():
      size = content["files"][name]["size"]
      digest = _digest_prefix(path, size)
      if digest.hexdigest() != content["files"][name]["digest"]:
        raise _ChangedError(f"{path.name} is damaged")
      os.truncate(path, size)
      self._digests[name] = digest
    return Progress(**content["progress"])


def _read_record(path: Path) -> JsonObject:
  try:
    record = json.loads(path.read_bytes())
    if record["digest"] == _digest_of(record["content"]):
      return record["content"]
  except (OSError, ValueError, RecursionError, LookupError, TypeError):  # any JSON, or none
    pass
  raise _ChangedError(f"{path.name} is damaged")


def _digest_prefix(path: Path, size: int) -> hashlib.blake2b:
  """The digest of the first `size` bytes of a file."""
  digest = _new_digest()
  remaining = size
  try:
    with path.open("rb") as stream:
      while remaining:
        block = stream.read(min(_BLOCK_BYTES, remaining))
        if not block:
          raise _ChangedError(f"{path.name} was cut short")
        digest.update(block)
        remaining -= len(block)
  except OSError as error:
    raise _ChangedError(f"{path.name} cannot be read ({error.strerror})") from None
  return digest


def _digest_of(content: Json) -> str:
  digest = _new_digest()
  digest.update(json.dumps(content, sort_keys=True).encode())
  return digest.hexdigest()


def _new_digest() -> hashlib.blake2b:
  return hashlib.blake2b(digest_size=16)
