"""Text files: each file is a document, read in pieces."""

import codecs
from collections.abc import Iterator
from typing import BinaryIO

from maxlite.data.sources.bad_rows import Reject, convert_rows, raise_error
from maxlite.data.sources.compressed import expanded_size, open_file, skip
from maxlite.errors import UserError
from maxlite.storage.object_store import DataFile

PIECE_BYTES = 1 << 18
# Of a document of other formats. Encoding a piece takes many times its size in memory.
MAX_PIECE_BYTES = 1 << 22

_CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # of a UTF-8 character, after its first byte
_FIXES = {
  b"PAR1": "write dataset_type=parquet",
  b"ARROW1": "write dataset_type=arrow",
  b"\x1f\x8b": "decompress the file, or name it *.txt.gz",
  b"\x28\xb5\x2f\xfd": "decompress the file, or name it *.txt.zst",
}


def text_documents(
  file: DataFile,
  _column: str,
  start: float,
  stop: float,
  reject: Reject = raise_error,
) -> Iterator[Iterator[bytes]]:
  """Read the fraction [start, stop) of the bytes of `file` as one document.

  A byte order mark is left out. Rejects lines that are not UTF-8, by file and byte.
  """
  size = expanded_size(file)
  begin = _character_start(file, int(size * start))
  end = _character_start(file, int(size * stop))
  with open_file(file) as stream:
    skip(stream, begin)
    yield _valid(_pieces(stream, end - begin), file, begin, reject)


def cut_document(document: bytes) -> Iterator[bytes]:
  """Yield a document in UTF-8 in pieces of about MAX_PIECE_BYTES, cut where `text` is cut."""
  begin = 0
  while begin < len(document):
    block = document[begin : begin + MAX_PIECE_BYTES]
    cut = len(block)
    if begin + cut < len(document):
      cut = _cut(block)
    yield block[:cut]
    begin += cut


def _valid(pieces: Iterator[bytes], file: DataFile, begin: int, reject: Reject) -> Iterator[bytes]:
  """Yield pieces that start at byte `begin` of `file`, without rejected lines."""

  def validate(line: bytes) -> bytes:
    nonlocal begin
    start = begin
    begin += len(line)
    try:
      line.decode()
    except UnicodeDecodeError as error:
      place = start + error.start
      raise UserError(f"{file}: byte {place} is not UTF-8: {_fix(file)}") from None
    if start == 0:
      return line.removeprefix(codecs.BOM_UTF8)
    return line

  for piece in pieces:
    lines = convert_rows(piece.splitlines(keepends=True), validate, reject)
    valid = b"".join(lines)
    if valid:
      yield valid


def _fix(file: DataFile) -> str:
  """Return what to do about a file that is not UTF-8, by its first bytes."""
  with open_file(file) as stream:
    start = stream.read(8)
  for magic, fix in _FIXES.items():
    if start.startswith(magic):
      return fix
  return "convert the file"


def _character_start(file: DataFile, offset: int) -> int:
  """Advance `offset` to the start of a UTF-8 character, unless it is 0."""
  if not offset:
    return 0
  with open_file(file) as stream:
    skip(stream, offset)
    following = stream.read(3)
  from_character = following.lstrip(_CONTINUATION_BYTES)
  return offset + len(following) - len(from_character)


def _pieces(stream: BinaryIO, size: int) -> Iterator[bytes]:
  """Yield `size` bytes, cut after a newline or, in a very long line, between characters."""
  rest = b""
  while block := stream.read(min(PIECE_BYTES, size)):
    size -= len(block)
    rest += block
    cut = _cut(rest)
    if cut:
      yield rest[:cut]
    rest = rest[cut:]
  if rest:
    yield rest


def _cut(data: bytes) -> int:
  """Return the position after the last newline; without one, after the last whole character."""
  after_newline = data.rfind(b"\n") + 1
  if after_newline:
    return after_newline
  decoder = codecs.getincrementaldecoder("utf-8")("replace")
  decoder.decode(data)
  incomplete, _ = decoder.getstate()
  return len(data) - len(incomplete)
