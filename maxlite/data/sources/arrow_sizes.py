"""Size and rows of the batches of an Arrow stream, read from their metadata without decompressing.

pyarrow decompresses a batch whole and has no limit, so that a small file could take all memory. The
metadata of a message is a FlatBuffers table; the fields read here are those of Arrow's Message.fbs.
"""

import dataclasses
import struct
from typing import Any, BinaryIO

_DICTIONARY, _RECORDS = 2, 3  # types of a message


@dataclasses.dataclass(frozen=True)
class BatchSizes:
  """Of all batches and dictionaries of a stream."""

  num_rows: int
  num_bytes: int  # decompressed


def read_sizes(stream: BinaryIO) -> BatchSizes:
  """Read the messages from the position of `stream` to their end.

  Raises:
    pyarrow.ArrowException, struct.error, IndexError: the stream is damaged.
  """
  from pyarrow import ipc

  num_rows = 0
  num_bytes = 0
  for message in ipc.MessageReader.open_stream(stream):
    metadata = message.metadata.to_pybytes()
    table = _FlatTable.root(metadata)
    kind = metadata[table.field(1)] if table.field(1) else 0
    if kind not in (_DICTIONARY, _RECORDS):
      continue
    batch = table.table(2)
    if kind == _DICTIONARY:
      batch = batch.table(1)
    else:
      num_rows += batch.number(0, "<q")
    num_bytes += _decompressed_size(batch, message.body)
  return BatchSizes(num_rows, num_bytes)


def _decompressed_size(batch: "_FlatTable", body: Any) -> int:
  """The bytes of all buffers of a RecordBatch; a compressed one begins with its size, or -1."""
  size = 0
  is_compressed = batch.field(3) != 0
  for offset, length in batch.pairs(2):
    if is_compressed and length >= 8:
      (stored,) = struct.unpack("<q", body.slice(offset, 8).to_pybytes())
      size += length if stored < 0 else stored
    else:
      size += length
  return size


@dataclasses.dataclass(frozen=True)
class _FlatTable:
  """A table of a FlatBuffers message; fields are numbered in the order of the schema."""

  data: bytes
  position: int

  @classmethod
  def root(cls, data: bytes) -> "_FlatTable":
    return cls(data, _number(data, 0, "<I"))

  def field(self, number: int) -> int:
    """The position of a field; 0 if it is absent."""
    fields = self.position - _number(self.data, self.position, "<i")
    size = _number(self.data, fields, "<H")
    entry = 4 + 2 * number
    offset = _number(self.data, fields + entry, "<H") if entry < size else 0
    return self.position + offset if offset else 0

  def number(self, number: int, form: str) -> int:
    position = self.field(number)
    return _number(self.data, position, form) if position else 0

  def table(self, number: int) -> "_FlatTable":
    position = self.field(number)
    return _FlatTable(self.data, position + _number(self.data, position, "<I"))

  def pairs(self, number: int) -> list[tuple[int, int]]:
    """A vector of structs of two 64-bit integers."""
    position = self.field(number)
    if not position:
      return []
    start = position + _number(self.data, position, "<I")
    count = _number(self.data, start, "<I")
    end = start + 4 + 16 * count
    return list(struct.iter_unpack("<qq", self.data[start + 4 : end]))


def _number(data: bytes, position: int, form: str) -> int:
  (value,) = struct.unpack_from(form, data, position)
  return value
