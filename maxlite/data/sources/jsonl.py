"""JSON lines: each line is a document."""

import json
from collections.abc import Iterator
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.object_store import DataFile
from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.compressed import open_file


def jsonl_documents(
  file: DataFile, column: str, start: float, stop: float, reject: Reject = raise_error
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the lines of `file`, skipping blank lines.

  Rejects lines that are not an object with a string in `column`, by file and line.
  """
  document = lambda row: iter([_text(row[1], column, row[0])])
  return convert_rows(read_objects(file, start, stop, reject), document, reject)


def read_objects(
  file: DataFile, start: float, stop: float, reject: Reject = raise_error
) -> Iterator[tuple[str, dict[str, Any]]]:
  """Yield (`FILE:LINE`, object) for the fraction [start, stop) of the lines, except blank ones.

  Rejects lines that are not a JSON object.
  """
  return convert_rows(_lines(file, start, stop), _object, reject)


def _lines(file: DataFile, start: float, stop: float) -> Iterator[tuple[str, bytes]]:
  begin, end = 0, None
  if (start, stop) != (0, 1):
    with open_file(file) as lines:
      num_lines = sum(1 for _ in lines)
    begin, end = int(num_lines * start), int(num_lines * stop)
  with open_file(file) as lines:
    for number, line in enumerate(lines):
      if number == end:
        return
      if number >= begin and not line.isspace():
        yield f"{file}:{number + 1}", line


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
