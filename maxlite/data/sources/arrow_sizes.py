"""Size and rows of the batches of an Arrow stream, read from their metadata without decompressing.

pyarrow decompresses a batch whole and has no limit, so that a small file could take all memory. The
metadata of a message is a FlatBuffers table; the fields read here are those of Arrow's Message.fbs.
"""

import dataclasses
import struct
from typing import BinaryIO, Protocol

# Types of a message.
_DICTIONARY = 2
_RECORDS = 3


@dataclasses.dataclass(frozen=True)
class BatchSizes:
  """The size of all batches and dictionaries of a stream; `num_bytes` is decompressed."""

  num_rows: int
  num_bytes: int


class Buffer(Protocol):
  """The part that is used of a buffer of pyarrow, which has no types."""

  def slice(self, offset: int, length: int) -> "Buffer": ...

  def to_pybytes(self) -> bytes: ...


def read_sizes(stream: BinaryIO) -> BatchSizes:
  """Read the metadata of the messages from the position of `stream` to their end.

  Raises:
    pyarrow.ArrowException, struct.error, IndexError: the stream is damaged.
  """
  from pyarrow import ipc

  num_rows = 0
  num_bytes = 0
  for message in ipc.MessageReader.open_stream(stream):
    table = _FlatTable.root(message.metadata.to_pybytes())
    kind = table.number(1, "<B")
    if kind == _RECORDS:
      batch = table.table(2)
      num_rows += batch.number(0, "<q")
      num_bytes += _decompressed_size(batch, message.body)
    elif kind == _DICTIONARY:
      dictionary = table.table(2)
      batch = dictionary.table(1)
      num_bytes += _decompressed_size(batch, message.body)
  return BatchSizes(num_rows, num_bytes)


def _decompressed_size(batch: "_FlatTable", body: Buffer) -> int:
  """Return the bytes of all buffers of a RecordBatch, decompressed."""
  is_compressed = batch.field(3) != 0
  size = 0
  for offset, length in batch.pairs(2):
    if is_compressed and length >= 8:
      size += _stored_size(body.slice(offset, 8), length)
    else:
      size += length
  return size


def _stored_size(start: Buffer, length: int) -> int:
  """Return the decompressed size, with which a buffer begins; -1 if it is not compressed."""
  (stored,) = struct.unpack("<q", start.to_pybytes())
  if stored < 0:
    return length
  return stored


@dataclasses.dataclass(frozen=True)
class _FlatTable:
  """A table of a FlatBuffers message; fields are numbered in the order of the schema."""

  data: bytes
  position: int

  @classmethod
  def root(cls, data: bytes) -> "_FlatTable":
    """Return the table of a whole message."""
    return cls(data, _number(data, 0, "<I"))

  def field(self, number: int) -> int:
    """Return the position of a field; 0 if it is absent."""
    fields = self.position - _number(self.data, self.position, "<i")
    size = _number(self.data, fields, "<H")
    entry = 4 + 2 * number
    if entry >= size:
      return 0
    offset = _number(self.data, fields + entry, "<H")
    if offset == 0:
      return 0
    return self.position + offset

  def number(self, number: int, form: str) -> int:
    """Return a field that is an integer of a `form` of struct; 0 if it is absent."""
    position = self.field(number)
    if position == 0:
      return 0
    return _number(self.data, position, form)

  def table(self, number: int) -> "_FlatTable":
    """Return a field that is a table."""
    position = self.field(number)
    offset = _number(self.data, position, "<I")
    return _FlatTable(self.data, position + offset)

  def pairs(self, number: int) -> list[tuple[int, int]]:
    """Return a field that is a vector of structs of two 64-bit integers; empty if it is absent."""
    position = self.field(number)
    if position == 0:
      return []
    start = position + _number(self.data, position, "<I")
    count = _number(self.data, start, "<I")
    first = start + 4
    end = first + 16 * count
    return list(struct.iter_unpack("<qq", self.data[first:end]))


def _number(data: bytes, position: int, form: str) -> int:
  """Read the integer at a position, in a `form` of struct."""
  (value,) = struct.unpack_from(form, data, position)
  return value
