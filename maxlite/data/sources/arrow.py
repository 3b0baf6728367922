"""Arrow files, such as those that Hugging Face `datasets` keeps: each row is a document."""

from collections.abc import Iterator
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.object_store import DataFile
from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.parquet import row_document


def arrow_documents(
  file: DataFile, column: str, start: float, stop: float, reject: Reject = raise_error
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the rows of `file`; rejects nulls.

  Raises:
    UserError: pyarrow is missing, or `file` is damaged or has no strings in `column`.
  """
  num_rows = sum(1 for _ in _rows(file, column)) if (start, stop) != (0, 1) else 0
  begin, end = int(num_rows * start), int(num_rows * stop) if stop < 1 else None
  rows = (row for n, row in enumerate(_rows(file, column, end)) if n >= begin)
  return convert_rows(rows, row_document, reject)


def _rows(file: DataFile, column: str, end: int | None = None) -> Iterator[tuple[str, str | None]]:
  """Yield (place, value of `column`) of the first `end` rows."""
  try:
    import pyarrow as pa
  except ImportError:
    raise UserError("dataset_type=arrow needs a package: pip install pyarrow") from None
  number = 0
  try:
    with file.open("rb") as stream:
      for batch in _batches(pa, stream):
        if column not in batch.schema.names:
          names = sorted(batch.schema.names)
          raise UserError(f"{file}: no column {column!r} among {names}: set text_column")
        values = batch.column(column)
        if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
          kind = f"{values.type}, not strings"
          raise UserError(f"{file}: column {column!r} holds {kind}: set text_column")
        for value in values:
          if number == end:
            return
          number += 1
          yield f"{file}: row {number}", value.as_py()
  except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
    raise UserError(f"{file}: not an Arrow file, or damaged ({error}): replace it") from None


def _batches(pa: Any, stream: Any) -> Iterator[Any]:
  """The record batches of Arrow's file or stream format."""
  is_file = stream.read(6) == b"ARROW1"
  stream.seek(0)
  if not is_file:
    yield from pa.ipc.open_stream(stream)
    return
  reader = pa.ipc.open_file(stream)
  yield from map(reader.get_batch, range(reader.num_record_batches))
