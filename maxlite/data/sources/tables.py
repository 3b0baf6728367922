"""Parquet and Arrow files, such as Hugging Face `datasets` writes: each row is a document."""

import dataclasses
import functools
import itertools
import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeAlias, TypeVar

from maxlite.data.sources.arrow_sizes import read_sizes
from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.compressed import TOO_LARGE, ExpansionLimit
from maxlite.data.sources.jsonl import JsonRow, read_objects
from maxlite.data.sources.text import cut_document
from maxlite.errors import UserError
from maxlite.storage.json_values import Json, JsonObject
from maxlite.storage.object_store import DataFile

ArrowObject: TypeAlias = Any  # an object of pyarrow, which has no types
_ARROW_FILE = b"ARROW1\0\0"
_BATCH_ROWS = 16  # decoded at once; a row of a small file may be megabytes


@dataclasses.dataclass(frozen=True)
class _Table:
  """An open file; `batches` are record batches that have the column of the text."""

  schema: ArrowObject
  count_rows: Callable[[], int]
  batches: Iterator[ArrowObject]


_OpenTable = Callable[[BinaryIO, str | None, ExpansionLimit], _Table]
T = TypeVar("T")


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

  def values(batch: ArrowObject) -> Iterator[str | None]:
    return (value.as_py() for value in batch.column(column))

  rows = _rows(open_table, kind, file, column, start, stop, values)
  yield from convert_rows(rows, _document, reject)


def read_rows(
  file: DataFile, start: float, stop: float, reject: Reject = raise_error
) -> Iterator[JsonRow]:
  """Yield the rows in the fraction [start, stop) of `file`, of JSON lines, Parquet or Arrow.

  A struct of a table has a null for every field that another row has; these fields are left out.

  Raises:
    UserError: pyarrow is missing, or `file` is damaged or expands to more than `ExpansionLimit`.
  """
  if file.suffix not in _OPEN:
    yield from read_objects(file, start, stop, reject)
    return

  def values(batch: ArrowObject) -> Iterator[JsonObject]:
    return (_without_nulls(row) for row in batch.to_pylist())

  kind = file.suffix.removeprefix(".")
  for place, record in _rows(_OPEN[file.suffix], kind, file, None, start, stop, values):
    yield JsonRow(place, record)


def _rows(
  open_table: _OpenTable,
  kind: str,
  file: DataFile,
  column: str | None,
  start: float,
  stop: float,
  values: Callable[[ArrowObject], Iterator[T]],
) -> Iterator[tuple[str, T]]:
  """Yield (place, value) of the rows, where `values` gives the values of a batch.

  Args:
    column: that is read, which must hold strings; None: all columns.
  """
  try:
    import pyarrow as pa
  except ImportError:
    raise UserError(f"dataset_type={kind} needs a package: pip install pyarrow") from None
  limit = ExpansionLimit(file, TOO_LARGE)
  try:
    with file.open("rb") as stream:
      table = open_table(stream, column, limit)
      if column is not None:
        _require_strings(table.schema, column, file)
      begin = 0
      end = None
      if (start, stop) != (0, 1):
        num_rows = table.count_rows()
        begin = int(num_rows * start)
        end = int(num_rows * stop)
      selected = itertools.islice(_values(table.batches, values, limit), begin, end)
      for number, value in enumerate(selected, start=begin + 1):
        yield f"{file}: row {number}", value
  except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
    raise UserError(
      f"{file}: not a file of dataset_type={kind}, or damaged ({error}): replace it"
    ) from None


def _without_nulls(value: Json) -> Json:
  """Return `value` without the fields of structs that are null."""
  if isinstance(value, dict):
    return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
  if isinstance(value, list):
    return [_without_nulls(inner) for inner in value]
  return value


def _require_strings(schema: ArrowObject, column: str, file: DataFile) -> None:
  import pyarrow as pa

  if column not in schema.names:
    names = sorted(schema.names)
    raise UserError(f"{file}: no column {column!r} among {names}: set text_column")
  kind = schema.field(column).type
  value = kind.value_type if pa.types.is_dictionary(kind) else kind
  is_text = pa.types.is_string(value) or pa.types.is_large_string(value)
  if not (is_text or pa.types.is_string_view(value)):
    raise UserError(f"{file}: column {column!r} holds {kind}, not strings: set text_column")


def _values(
  batches: Iterator[ArrowObject],
  values: Callable[[ArrowObject], Iterator[T]],
  limit: ExpansionLimit,
) -> Iterator[T]:
  for batch in batches:
    limit.add(batch.nbytes)
    yield from values(batch)


def _document(row: tuple[str, str | None]) -> Iterator[bytes]:
  place, text = row
  if text is None:
    raise UserError(f"{place}: null: fill in or remove the row")
  return cut_document(text.encode())


def _open_parquet(stream: BinaryIO, column: str | None, limit: ExpansionLimit) -> _Table:
  import pyarrow.parquet as pq

  table = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
  sizes = _chunk_sizes(table.metadata, column)
  limit.check(sum(sizes))
  # A dictionary holds a value once for many rows. No value is larger than its chunk.
  largest = max(sizes, default=1)
  batch_rows = min(max(limit.max_bytes // largest, 1), _BATCH_ROWS)
  columns = None if column is None else [column]
  batches = table.iter_batches(batch_size=batch_rows, columns=columns)
  return _Table(table.schema_arrow, lambda: table.metadata.num_rows, batches)


def _chunk_sizes(metadata: ArrowObject, column: str | None) -> list[int]:
  """The sizes in bytes, decompressed, of the parts of a column (None: all) in each row group."""
  sizes = []
  for group in range(metadata.num_row_groups):
    for n in range(metadata.num_columns):
      chunk = metadata.row_group(group).column(n)
      if column in (None, chunk.path_in_schema):
        sizes.append(chunk.total_uncompressed_size)
  return sizes


def _open_arrow(stream: BinaryIO, column: str | None, limit: ExpansionLimit) -> _Table:
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
  options = None
  if column is not None:  # other columns are not decompressed
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
_OPEN: dict[str, _OpenTable] = {".parquet": _open_parquet, ".arrow": _open_arrow}
