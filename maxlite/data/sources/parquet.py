"""Parquet files: each row is a document."""

from collections.abc import Iterator
from pathlib import Path

from maxlite.config.errors import UserError

_BATCH_ROWS = 256


def parquet_documents(
  file: Path, column: str, start: float, stop: float
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the rows of `file`, skipping nulls.

  Raises:
    UserError: pyarrow is missing, or `file` is not parquet with strings in `column`.
  """
  try:
    import pyarrow as pa
    import pyarrow.parquet as pq
  except ImportError:
    raise UserError("dataset_type=parquet needs a package: pip install pyarrow") from None
  try:
    table = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
  except pa.ArrowInvalid as error:
    raise UserError(f"{file}: not a parquet file ({error})") from None
  with table:
    names = table.schema_arrow.names
    if column not in names:
      raise UserError(f"{file}: no column {column!r} among {sorted(names)}: set text_column")
    kind = table.schema_arrow.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
      raise UserError(f"{file}: column {column!r} holds {kind}, not strings: set text_column")
    num_rows = table.metadata.num_rows
    selected = range(int(num_rows * start), int(num_rows * stop))
    batches = table.iter_batches(batch_size=_BATCH_ROWS, columns=[column])
    texts = (text for batch in batches for text in batch.column(0).to_pylist())
    for number, text in enumerate(texts):
      if number in selected and text is not None:
        yield iter([text.encode()])
