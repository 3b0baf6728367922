"""JSON lines: every line is one document."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError


def jsonl_documents(
  file: Path, column: str, start: float, stop: float
) -> Iterator[Iterator[bytes]]:
  """Documents of the share [start, stop) of the lines of `file`; blank lines are passed over.

  Raises:
    UserError: a line is not an object with a string in `column`; names file and line.
  """
  for place, record in read_objects(file, start, stop):
    yield iter([_text(record, column, place)])


def read_objects(
  file: Path, start: float = 0, stop: float = 1
) -> Iterator[tuple[str, dict[str, Any]]]:
  """(`FILE:LINE`, object) of the share [start, stop) of the lines; blank ones are passed over.

  Raises:
    UserError: a line is no JSON object.
  """
  begin, end = 0, None
  if (start, stop) != (0, 1):
    num_lines = _count_lines(file)
    begin, end = int(num_lines * start), int(num_lines * stop)
  with file.open("rb") as lines:
    for number, line in enumerate(lines):
      if number == end:
        return
      if number >= begin and not line.isspace():
        place = f"{file}:{number + 1}"
        yield place, _object(line, place)


def _count_lines(file: Path) -> int:
  with file.open("rb") as lines:
    return sum(1 for _ in lines)


def _object(line: bytes, place: str) -> dict[str, Any]:
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f"{place}: not JSON ({error}): mend or remove the line") from None
  if not isinstance(record, dict):
    raise UserError(f"{place}: not a JSON object: write {{...}} in each line")
  return record


def _text(record: dict[str, Any], column: str, place: str) -> bytes:
  if column not in record:
    raise UserError(f"{place}: no field {column!r} among {sorted(record)}: set text_column")
  if not isinstance(record[column], str):
    raise UserError(f"{place}: field {column!r} is not a string: set text_column to one that is")
  # JSON can spell half of a surrogate pair, which no encoding can hold.
  return record[column].encode(errors="replace")
