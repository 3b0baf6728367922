"""JSON lines: each line is a document."""

import codecs
import json
import math
from collections.abc import Iterator
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.object_store import DataFile
from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.compressed import open_file
from maxlite.data.sources.text import cut_document

# In a row. A compressed file can hold billions, which are read without any progress.
MAX_BLANK_LINES = 1_000_000


def jsonl_documents(
  file: DataFile, column: str, start: float, stop: float, reject: Reject = raise_error
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the lines of `file`, skipping blank lines.

  Rejects lines that are not an object with a string in `column`, by file and line.
  """
  document = lambda row: cut_document(_text(row[1], column, row[0]))
  return convert_rows(read_objects(file, start, stop, reject), document, reject)


def read_objects(
  file: DataFile, start: float, stop: float, reject: Reject = raise_error
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yield (`FILE:LINE`, object) for the fraction [start, stop) of the lines, except blank ones.

  Rejects lines that are not a JSON object.
  """
  return convert_rows(_lines(file, start, stop), _object, reject)


def _lines(file: DataFile, start: float, stop: float) -> Iterator[tuple[str, bytes]]:
  """Yield (`FILE:LINE`, line) for the fraction [start, stop) of the lines, except blank ones."""
  begin = 0
  end = math.inf
  if (start, stop) != (0, 1):
    num_lines = sum(1 for _ in _all_lines(file))
    begin = int(num_lines * start)
    end = int(num_lines * stop)
  for index, line in enumerate(_all_lines(file)):
    if index >= end:
      return
    if index >= begin and not line.isspace():
      yield f"{file}:{index + 1}", line


def _all_lines(file: DataFile) -> Iterator[bytes]:
  """Yield the lines, the first without a byte order mark; raise UserError if too many are blank."""
  num_blank = 0
  with open_file(file) as lines:
    for index, line in enumerate(lines):
      num_blank = num_blank + 1 if line.isspace() else 0
      if num_blank > MAX_BLANK_LINES:
        raise UserError(
          f"{file}: {MAX_BLANK_LINES:,} blank lines up to line {index}: remove them, or the file"
        )
      yield line if index else line.removeprefix(codecs.BOM_UTF8)


def _object(row: tuple[str, bytes]) -> tuple[str, dict[str, Any]]:
  place, line = row
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f"{place}: not JSON ({error}): fix or remove the line") from None
  if not isinstance(record, dict):
    raise UserError(f"{place}: not a JSON object: write {{...}} in each line")
  return place, record


def _text(record: dict[str, Any], column: str, place: str) -> bytes:
  if column not in record:
    raise UserError(f"{place}: no field {column!r} among {sorted(record)}: set text_column")
  if not isinstance(record[column], str):
    raise UserError(f"{place}: field {column!r} is not a string: set text_column to one that is")
  # JSON can spell an unpaired surrogate, which no encoding can represent.
  return record[column].encode(errors="replace")
