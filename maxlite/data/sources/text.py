"""Plain files: every file is one document, read in pieces."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 1 << 18


def text_documents(
  file: Path, _column: str, start: float, stop: float
) -> Iterator[Iterator[bytes]]:
  """The one document that the share [start, stop) of the bytes of `file` is."""
  size = file.stat().st_size
  with file.open("rb") as stream:
    begin, end = (_character_start(stream, int(size * share)) for share in (start, stop))
    yield _pieces(stream, begin, end)


def _character_start(stream: BinaryIO, offset: int) -> int:
  """`offset`, moved on to where a UTF-8 character starts; 0 stays, whatever is there."""
  if not offset:
    return 0
  stream.seek(offset)
  following = stream.read(3)
  return offset + len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))


def _pieces(stream: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
  """Bytes [begin, end) cut after a newline or, in a very long line, between two characters."""
  stream.seek(begin)
  rest = b""
  while block := stream.read(min(PIECE_BYTES, end - stream.tell())):
    rest += block
    cut = _cut(rest)
    if cut:
      yield rest[:cut]
    rest = rest[cut:]
  if rest:
    yield rest


def _cut(data: bytes) -> int:
  newline = data.rfind(b"\n") + 1
  if newline:
    return newline
  for back in range(1, min(4, len(data)) + 1):
    byte = data[-back]
    if byte >= 0xC0:  # the lead of a character of 2, 3 or 4 bytes
      length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
      return len(data) - back if back < length else len(data)
  return len(data)
