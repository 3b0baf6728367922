"""Parquet and Arrow files, such as those of Hugging Face `datasets`: each row is a document."""

import dataclasses
import functools
import itertools
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeAlias

from maxlite.config.errors import UserError
from maxlite.config.object_store import DataFile
from maxlite.data.sources.arrow_sizes import read_sizes
from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.compressed import TOO_LARGE, ExpansionLimit
from maxlite.data.sources.text import cut_document

ArrowObject: TypeAlias = Any  # an object of pyarrow, which has no types
_ARROW_FILE = b"ARROW1\0\0"
_BATCH_ROWS = 16  # decoded at once; a row of a small file may be megabytes


@dataclasses.dataclass(frozen=True)
class _Table:
  """An open file; `batches` are record batches that have the column of the text."""

  schema: ArrowObject
  count_rows: Callable[[], int]
  batches: Iterator[ArrowObject]


_OpenTable = Callable[[BinaryIO, str, ExpansionLimit], _Table]


def _documents(
  open_table: _OpenTable,
  kind: str,
  file: DataFile,
  column: str,
  start: float,
  stop: float,
  reject: Reject = raise_error,
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the rows of `file`; rejects nulls.

  Raises:
    UserError: pyarrow is missing, `file` is damaged or has no strings in `column`, or the strings
      are more than `ExpansionLimit` allows.
  """
  try:
    import pyarrow as pa
  except ImportError:
    raise UserError(f"dataset_type={kind} needs a package: pip install pyarrow") from None
  limit = ExpansionLimit(file, TOO_LARGE)
  try:
    with file.open("rb") as stream:
      table = open_table(stream, column, limit)
      _require_strings(table.schema, column, file)
      begin = 0
      end = None
      if (start, stop) != (0, 1):
        num_rows = table.count_rows()
        begin = int(num_rows * start)
        end = int(num_rows * stop)
      values = itertools.islice(_values(table.batches, column, limit), begin, end)
      numbered = enumerate(values, start=begin + 1)
      rows = ((f"{file}: row {number}", value.as_py()) for number, value in numbered)
      yield from convert_rows(rows, _document, reject)
  except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
    raise UserError(
      f"{file}: not a file of dataset_type={kind}, or damaged ({error}): replace it"
    ) from None


def _require_strings(schema: ArrowObject, column: str, file: DataFile) -> None:
  import pyarrow as pa

  if column not in schema.names:
    names = sorted(schema.names)
    raise UserError(f"{file}: no column {column!r} among {names}: set text_column")
  kind = schema.field(column).type
  if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
    raise UserError(f"{file}: column {column!r} holds {kind}, not strings: set text_column")


def _values(
  batches: Iterator[ArrowObject], column: str, limit: ExpansionLimit
) -> Iterator[ArrowObject]:
  for batch in batches:
    values = batch.column(column)
    limit.add(values.nbytes)
    yield from values


def _document(row: tuple[str, str | None]) -> Iterator[bytes]:
  place, text = row
  if text is None:
    raise UserError(f"{place}: null: fill in or remove the row")
  return cut_document(text.encode())


def _open_parquet(stream: BinaryIO, column: str, limit: ExpansionLimit) -> _Table:
  import pyarrow.parquet as pq

  table = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
  sizes = _chunk_sizes(table.metadata, column)
  limit.check(sum(sizes))
  # A dictionary holds a value once for many rows. No value is larger than its chunk.
  largest = max(sizes, default=1)
  batch_rows = min(max(limit.max_bytes // largest, 1), _BATCH_ROWS)
  batches = table.iter_batches(batch_size=batch_rows, columns=[column])
  return _Table(table.schema_arrow, lambda: table.metadata.num_rows, batches)


def _chunk_sizes(metadata: ArrowObject, column: str) -> list[int]:
  """The size in bytes, decompressed, of the part of a column in each row group."""
  sizes = []
  for group in range(metadata.num_row_groups):
    for n in range(metadata.num_columns):
      chunk = metadata.row_group(group).column(n)
      if chunk.path_in_schema == column:
        sizes.append(chunk.total_uncompressed_size)
  return sizes


def _open_arrow(stream: BinaryIO, column: str, limit: ExpansionLimit) -> _Table:
  """Open Arrow's stream format, or its file format: a stream between two marks."""
  from pyarrow import ipc

  begin = 0
  if stream.read(len(_ARROW_FILE)) == _ARROW_FILE:
    begin = len(_ARROW_FILE)
    _require_end(stream)
  stream.seek(begin)
  try:
    sizes = read_sizes(stream)
  except (struct.error, IndexError) as error:
    raise OSError(f"its metadata are damaged: {error}") from None
  limit.check(sizes.num_bytes)
  stream.seek(begin)
  schema = ipc.open_stream(stream).schema
  # Other columns are not decompressed.
  options = ipc.IpcReadOptions(included_fields=[max(schema.get_field_index(column), 0)])
  stream.seek(begin)
  return _Table(schema, lambda: sizes.num_rows, iter(ipc.open_stream(stream, options=options)))


def _require_end(stream: BinaryIO) -> None:
  """Raise OSError if the end of Arrow's file format is missing, as a stream may end anywhere."""
  mark = _ARROW_FILE.rstrip(b"\0")
  stream.seek(-len(mark), os.SEEK_END)
  if stream.read() != mark:
    raise OSError("its end is missing")


parquet_documents = functools.partial(_documents, _open_parquet, "parquet")
arrow_documents = functools.partial(_documents, _open_arrow, "arrow")
