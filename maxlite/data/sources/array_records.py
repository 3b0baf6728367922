"""ArrayRecord files: each record is a document, as UTF-8 text or in a `tf.train.Example`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.compressed import TOO_LARGE, ExpansionLimit
from maxlite.data.sources.text import cut_document
from maxlite.errors import UserError
from maxlite.storage.object_store import DataFile, RemoteFile, download

# The defaults read ahead in every thread, each of which holds records of any size.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class Record(NamedTuple):
  """A record, and its place in messages."""

  place: str
  content: bytes


class _Field(NamedTuple):
  """A field of a Protocol Buffers message whose content has a length."""

  number: int
  content: bytes


def array_record_documents(
  file: DataFile,
  column: str,
  start: float,
  stop: float,
  reject: Reject = raise_error,
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the records of `file`.

  Of an Example, the first value of the feature `column` is the document. An object on a store is
  copied to a temporary file. Rejects records that are not UTF-8.

  Raises:
    UserError: array_record is missing, or `file` is damaged.
  """

  def document(record: Record) -> Iterator[bytes]:
    return cut_document(_text(record, column))

  return convert_rows(_records(file, start, stop), document, reject)


def _records(file: DataFile, start: float, stop: float) -> Iterator[Record]:
  """Yield the records in the fraction [start, stop) of `file`."""
  try:
    from array_record.python.array_record_module import ArrayRecordReader
  except ImportError:
    raise UserError("dataset_type=array_record needs a package: pip install array_record") from None
  limit = ExpansionLimit(file, TOO_LARGE)
  with tempfile.TemporaryDirectory() as folder:
    path: DataFile = file
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
        content = reader.read()
        limit.add(len(content))
        yield Record(f"{file}: record {number}", content)
    except (RuntimeError, IndexError, ValueError) as error:
      if isinstance(error, UserError):
        raise
      raise UserError(f"{file}: not an ArrayRecord, or damaged ({error}): replace it") from None


def _text(record: Record, column: str) -> bytes:
  """Return the text of a record; raise UserError if it has none or is not UTF-8."""
  features = _features(record.content)
  if features and column not in features:
    raise UserError(
      f"{record.place}: no feature {column!r} among {sorted(features)}: set text_column"
    )
  text = features.get(column, record.content)
  try:
    text.decode()
  except UnicodeDecodeError:
    raise UserError(f"{record.place} is not UTF-8") from None
  return text


def _features(record: bytes) -> dict[str, bytes]:
  """Return {name: first value} of the byte features of a `tf.train.Example`.

  Returns an empty dict for other records.
  """
  try:
    return _parse_example(record)
  except (ValueError, KeyError, IndexError):
    return {}


def _parse_example(record: bytes) -> dict[str, bytes]:
  """Return {name: first value} of the byte features of a `tf.train.Example`.

  Its only field is a map from names to features. An entry of a map has its key in field 1 and its
  value in field 2. A feature has its list of bytes in field 1, whose fields are the values.

  Raises:
    ValueError, KeyError, IndexError: `record` is something else.
  """
  (features,) = _fields(record)
  first_values = {}
  for entry in _fields(features.content):
    name_and_feature = _content_by_number(entry.content)
    name = name_and_feature[1].decode()
    lists = _content_by_number(name_and_feature[2])
    values = list(_fields(lists.get(1, b"")))
    if values:
      first_values[name] = values[0].content
    else:
      first_values.pop(name, None)
  return first_values


def _content_by_number(message: bytes) -> dict[int, bytes]:
  """Return the contents of the fields of a message; of equal numbers, the last."""
  return {field.number: field.content for field in _fields(message)}


def _fields(message: bytes) -> Iterator[_Field]:
  """Yield the fields of a Protocol Buffers message.

  Raises:
    ValueError, IndexError: a field has no length, or the message ends within a field.
  """
  position = 0
  while position < len(message):
    tag, position = _read_varint(message, position)
    number, kind = divmod(tag, 8)
    size, position = _read_varint(message, position)
    if kind != 2 or position + size > len(message):
      raise ValueError("not a message of fields with a length")
    yield _Field(number, message[position : position + size])
    position += size


def _read_varint(message: bytes, position: int) -> tuple[int, int]:
  """Read an integer of 7 bits per byte, the lowest first; return it and the position after it."""
  value = 0
  shift = 0
  while True:
    byte = message[position]
    position += 1
    value |= (byte & 127) << shift
    shift += 7
    if byte <= 127:
      return value, position
