"""Data files that may be compressed (`.gz`, `.zst`), expanded while they are read, and a limit."""

import gzip
import io
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from maxlite.errors import UserError
from maxlite.storage.object_store import DataFile, size_and_version

if TYPE_CHECKING:
  from _typeshed import WriteableBuffer

EXPANDED = (".gz", ".zst")
# A file that expands to more of both is refused: an attack, or damaged.
MAX_RATIO = 200
MAX_BYTES = 1 << 28
TOO_LARGE = "check where it is from, or write its text as JSON lines"  # for tables and records
_BUFFER_BYTES = 1 << 18


class ExpansionLimit:
  """Counts the bytes that a file of compressed content expands to."""

  def __init__(self, file: DataFile, fix: str) -> None:
    self._file = file
    self._fix = fix
    self._num_bytes = 0
    compressed_size, _ = size_and_version(file)
    self.max_bytes = max(MAX_RATIO * compressed_size, MAX_BYTES)

  def add(self, num_bytes: int) -> None:
    """Count further bytes. Raises UserError if they are too many."""
    self._num_bytes += num_bytes
    self.check(self._num_bytes)

  def check(self, num_bytes: int) -> None:
    """Raise UserError if `num_bytes` in all are too many."""
    if num_bytes > self.max_bytes:
      raise UserError(f"{self._file} expands to more than {MAX_RATIO} times its size: {self._fix}")


def open_file(file: DataFile) -> BinaryIO:
  """Open for reading, expanding if compressed, without `seek`.

  Raises:
    UserError: now or while reading, the file is damaged, or expands more than MAX_RATIO allows.
  """
  if file.suffix not in EXPANDED:
    return file.open("rb")
  return io.BufferedReader(_Expander(file), _BUFFER_BYTES)


def inner_name(name: str) -> str:
  """Return the name without the suffix of the compression."""
  suffix = Path(name).suffix
  if suffix not in EXPANDED:
    return name
  return name.removesuffix(suffix)


def expanded_size(file: DataFile) -> int:
  """Return the number of bytes that `open_file` gives; reads a compressed file."""
  if file.suffix not in EXPANDED:
    size, _ = size_and_version(file)
    return size
  num_bytes = 0
  with open_file(file) as stream:
    while block := stream.read(_BUFFER_BYTES):
      num_bytes += len(block)
  return num_bytes


def skip(stream: BinaryIO, num_bytes: int) -> None:
  """Advance by seeking, or in a compressed file by reading."""
  if stream.seekable():
    stream.seek(num_bytes, io.SEEK_CUR)
    return
  while block := stream.read(min(num_bytes, _BUFFER_BYTES)):
    num_bytes -= len(block)


class _Expander(io.RawIOBase):
  """The expanded content of a compressed file."""

  def __init__(self, file: DataFile) -> None:
    self._file = file
    self._limit = ExpansionLimit(file, "decompress it first")
    self._compressed = file.open("rb")
    if file.suffix == ".gz":
      self._stream = gzip.GzipFile(fileobj=self._compressed)
      return
    try:
      import pyarrow as pa
    except ImportError:
      raise UserError(f"{file}: .zst needs a package: pip install pyarrow") from None
    self._stream = pa.CompressedInputStream(pa.PythonFile(self._compressed, "r"), "zstd")

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: "WriteableBuffer") -> int:
    view = memoryview(buffer)
    try:
      block = self._stream.read(len(view))
    except (OSError, EOFError, ValueError) as error:  # of gzip, zlib and pyarrow
      raise UserError(f"{self._file} is damaged ({error}): replace it") from None
    self._limit.add(len(block))
    view[: len(block)] = block
    return len(block)

  def close(self) -> None:
    if not self.closed:
      self._stream.close()
      self._compressed.close()
    super().close()
