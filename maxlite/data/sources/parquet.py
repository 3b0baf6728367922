"""Parquet files: each row is a document."""

from collections.abc import Iterator

from maxlite.config.errors import UserError
from maxlite.config.object_store import DataFile
from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error

_BATCH_ROWS = 16  # decoded at once; a row of a small file may be megabytes


def parquet_documents(
  file: DataFile, column: str, start: float, stop: float, reject: Reject = raise_error
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the rows of `file`; rejects nulls.

  Raises:
    UserError: pyarrow is missing, or `file` is damaged or has no strings in `column`.
  """
  return convert_rows(_rows(file, column, start, stop), row_document, reject)


def row_document(row: tuple[str, str | None]) -> Iterator[bytes]:
  """The text of (place, value); raise UserError if it is null."""
  place, text = row
  if text is None:
    raise UserError(f"{place}: null")
  return iter([text.encode()])


def _rows(
  file: DataFile, column: str, start: float, stop: float
) -> Iterator[tuple[str, str | None]]:
  """Yield (place, value of `column`) of each row in a fraction of the file."""
  try:
    import pyarrow as pa
    import pyarrow.parquet as pq
  except ImportError:
    raise UserError("dataset_type=parquet needs a package: pip install pyarrow") from None
  try:
    with (
      file.open("rb") as stream,
      pq.ParquetFile(stream, buffer_size=1 << 20, pre_buffer=False) as table,
    ):
      names, num_rows = table.schema_arrow.names, table.metadata.num_rows
      if column not in names:
        raise UserError(f"{file}: no column {column!r} among {sorted(names)}: set text_column")
      kind = table.schema_arrow.field(column).type
      if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{file}: column {column!r} holds {kind}, not strings: set text_column")
      selected = range(int(num_rows * start), int(num_rows * stop))
      batches = table.iter_batches(batch_size=_BATCH_ROWS, columns=[column])
      for number, text in enumerate(text for batch in batches for text in batch.column(0)):
        if number in selected:
          yield f"{file}: row {number + 1}", text.as_py()
  except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
    raise UserError(f"{file}: not a parquet file, or damaged ({error}): replace it") from None
