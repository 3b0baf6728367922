"""ArrayRecord files: each record is a document, as UTF-8 text or in a `tf.train.Example`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.object_store import DataFile, RemoteFile, download
from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.compressed import TOO_LARGE, ExpansionLimit
from maxlite.data.sources.text import cut_document

# The defaults read ahead in every thread, each of which holds records of any size.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def array_record_documents(
  file: DataFile, column: str, start: float, stop: float, reject: Reject = raise_error
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the records of `file`.

  Of an Example, the first value of the feature `column` is the document. An object on a store is
  copied to a temporary file. Rejects records that are not UTF-8.

  Raises:
    UserError: array_record is missing, or `file` is damaged.
  """
  document = lambda row: cut_document(_text(row[0], row[1], column))
  return convert_rows(_records(file, start, stop), document, reject)


def _records(file: DataFile, start: float, stop: float) -> Iterator[tuple[str, bytes]]:
  try:
    from array_record.python.array_record_module import ArrayRecordReader
  except ImportError:
    raise UserError("dataset_type=array_record needs a package: pip install array_record") from None
  limit = ExpansionLimit(file, TOO_LARGE)
  with tempfile.TemporaryDirectory() as folder:
    path: Any = file
    if isinstance(file, RemoteFile):
      path = Path(folder, "records")
      download(file.uri, path)
    try:
      reader = ArrayRecordReader(str(path), _READER_OPTIONS)
      if not reader.ok():  # it would have no records
        raise ValueError("no footer")
      num_records = reader.num_records()
      first = int(num_records * start)
      last = int(num_records * stop)
      reader.seek(first)
      for number in range(first + 1, last + 1):
        record = reader.read()
        limit.add(len(record))
        yield f"{file}: record {number}", record
    except (RuntimeError, IndexError, ValueError) as error:
      if isinstance(error, UserError):
        raise
      raise UserError(f"{file}: not an ArrayRecord, or damaged ({error}): replace it") from None


def _text(place: str, record: bytes, column: str) -> bytes:
  features = _features(record)
  if features and column not in features:
    raise UserError(f"{place}: no feature {column!r} among {sorted(features)}: set text_column")
  text = features.get(column, record)
  try:
    text.decode()
  except UnicodeDecodeError:
    raise UserError(f"{place} is not UTF-8") from None
  return text


def _features(record: bytes) -> dict[str, bytes]:
  """{name: first value} of the byte features of a `tf.train.Example`; empty for other records."""
  try:
    ((_, features),) = _fields(record)
    pairs = [dict(_fields(pair)) for _, pair in _fields(features)]
    lists = {pair[1].decode(): dict(_fields(pair[2])).get(1, b"") for pair in pairs}
    return {name: value for name, found in lists.items() for _, value in [*_fields(found)][:1]}
  except (ValueError, KeyError, IndexError):  # it is not one
    return {}


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
  """Yield (number, content) of the fields of a Protocol Buffers message, all with a length."""
  position = 0

  def varint() -> int:
    nonlocal position
    value, shift, more = 0, 0, True
    while more:
      byte, position = message[position], position + 1
      value, shift, more = value | (byte & 127) << shift, shift + 7, byte > 127
    return value

  while position < len(message):
    number, kind = divmod(varint(), 8)
    size = varint()
    if kind != 2 or position + size > len(message):
      raise ValueError("not a message of fields with a length")
    yield number, message[position : position + size]
    position += size
