"""JSON lines: each line is a document."""

import codecs
import json
import math
from collections.abc import Iterator
from typing import NamedTuple

from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.compressed import open_file
from maxlite.data.sources.text import cut_document
from maxlite.errors import UserError
from maxlite.storage.json_values import JsonObject
from maxlite.storage.object_store import DataFile

# In a row. A compressed file can hold billions, which are read without any progress.
MAX_BLANK_LINES = 1_000_000


class JsonRow(NamedTuple):
  """The object in a line, and its place (`FILE:LINE`)."""

  place: str
  record: JsonObject


def jsonl_documents(
  file: DataFile,
  column: str,
  start: float,
  stop: float,
  reject: Reject = raise_error,
) -> Iterator[Iterator[bytes]]:
  """Read the documents in the fraction [start, stop) of the lines of `file`, skipping blank lines.

  Rejects lines that are not an object with a string in `column`, by file and line.
  """

  def document(row: JsonRow) -> Iterator[bytes]:
    return cut_document(_text(row, column))

  rows = read_objects(file, start, stop, reject)
  return convert_rows(rows, document, reject)


def read_objects(
  file: DataFile,
  start: float,
  stop: float,
  reject: Reject = raise_error,
) -> Iterator[JsonRow]:
  """Yield the objects in the fraction [start, stop) of the lines, except blank ones.

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
      if line.isspace():
        num_blank += 1
      else:
        num_blank = 0
      if num_blank > MAX_BLANK_LINES:
        raise UserError(
          f"{file}: {MAX_BLANK_LINES:,} blank lines up to line {index}: remove them, or the file"
        )
      if index:
        yield line
      else:
        yield line.removeprefix(codecs.BOM_UTF8)


def _object(row: tuple[str, bytes]) -> JsonRow:
  """Parse a line, given as (`FILE:LINE`, line); raise UserError if it is not an object."""
  place, line = row
  try:
    record = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise UserError(f"{place}: not JSON ({error}): fix or remove the line") from None
  if not isinstance(record, dict):
    raise UserError(f"{place}: not a JSON object: write {{...}} in each line")
  return JsonRow(place, record)


def _text(row: JsonRow, column: str) -> bytes:
  """Return the text of a row in UTF-8; raise UserError if it has none."""
  if column not in row.record:
    fields = sorted(row.record)
    raise UserError(f"{row.place}: no field {column!r} among {fields}: set text_column")
  text = row.record[column]
  if not isinstance(text, str):
    raise UserError(
      f"{row.place}: field {column!r} is not a string: set text_column to one that is"
    )
  # JSON can spell an unpaired surrogate, which no encoding can represent.
  return text.encode(errors="replace")
