"""Parquet and Arrow files, such as those of Hugging Face `datasets`: each row is a document."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from maxlite.config.errors import UserError
from maxlite.config.object_store import DataFile
from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error

_BATCH_ROWS = 16  # decoded at once; a row of a small file may be megabytes
# pyarrow has no types: schema, function that counts the rows, and record batches of a column.
_Table = tuple[Any, Callable[[], int], Iterator[Any]]


def _documents(
  open_table: Callable[[BinaryIO, str], _Table],
  kind: str,
  file: DataFile,
  column: str,
  start: float,
  stop: float,
  reject: Reject = raise_error,
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the rows of `file`; rejects nulls.

  Raises:
    UserError: pyarrow is missing, or `file` is damaged or has no strings in `column`.
  """
  try:
    import pyarrow as pa
  except ImportError:
    raise UserError(f"dataset_type={kind} needs a package: pip install pyarrow") from None
  try:
    with file.open("rb") as stream:
      schema, count_rows, batches = open_table(stream, column)
      if column not in schema.names:
        names = sorted(schema.names)
        raise UserError(f"{file}: no column {column!r} among {names}: set text_column")
      strings = schema.field(column).type
      if not (pa.types.is_string(strings) or pa.types.is_large_string(strings)):
        raise UserError(f"{file}: column {column!r} holds {strings}, not strings: set text_column")
      begin, end = 0, None
      if (start, stop) != (0, 1):
        begin, end = (int(count_rows() * share) for share in (start, stop))
      values = (value for batch in batches for value in batch.column(column))
      numbered = enumerate(itertools.islice(values, begin, end), start=begin + 1)
      rows = ((f"{file}: row {number}", value.as_py()) for number, value in numbered)
      yield from convert_rows(rows, _document, reject)
  except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
    raise UserError(
      f"{file}: not a file of dataset_type={kind}, or damaged ({error}): replace it"
    ) from None


def _document(row: tuple[str, str | None]) -> Iterator[bytes]:
  place, text = row
  if text is None:
    raise UserError(f"{place}: null: fill in or remove the row")
  return iter([text.encode()])


def _open_parquet(stream: BinaryIO, column: str) -> _Table:
  import pyarrow.parquet as pq

  table = pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False)
  batches = table.iter_batches(batch_size=_BATCH_ROWS, columns=[column])
  return table.schema_arrow, lambda: table.metadata.num_rows, batches


def _open_arrow(stream: BinaryIO, _column: str) -> _Table:
  """Open Arrow's file or stream format, of which the latter is read to count its rows."""
  from pyarrow import ipc

  if stream.read(6) == b"ARROW1":
    table = ipc.open_file(stream)
    return table.schema, table.count_rows, map(table.get_batch, range(table.num_record_batches))

  def batches() -> Iterator[Any]:
    stream.seek(0)
    yield from ipc.open_stream(stream)

  stream.seek(0)
  schema = ipc.open_stream(stream).schema
  return schema, lambda: sum(batch.num_rows for batch in batches()), batches()


parquet_documents = functools.partial(_documents, _open_parquet, "parquet")
arrow_documents = functools.partial(_documents, _open_arrow, "arrow")
