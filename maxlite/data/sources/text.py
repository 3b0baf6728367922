"""Text files: each file is a document, read in pieces."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECE_BYTES = 1 << 18


def text_documents(
  file: Path, _column: str, start: float, stop: float
) -> Iterator[Iterator[bytes]]:
  """Read the fraction [start, stop) of the bytes of `file` as one document."""
  size = file.stat().st_size
  with file.open("rb") as stream:
    begin, end = (_character_start(stream, int(size * share)) for share in (start, stop))
    yield _pieces(stream, begin, end)


def _character_start(stream: BinaryIO, offset: int) -> int:
  """Advance `offset` to the start of a UTF-8 character, unless it is 0."""
  if not offset:
    return 0
  stream.seek(offset)
  following = stream.read(3)
  return offset + len(following) - len(following.lstrip(bytes(range(0x80, 0xC0))))


def _pieces(stream: BinaryIO, begin: int, end: int) -> Iterator[bytes]:
  """Yield bytes [begin, end), cut after a newline or, in a very long line, between characters."""
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
    if byte >= 0xC0:  # lead byte of a character of 2, 3 or 4 bytes
      length = 2 + (byte >= 0xE0) + (byte >= 0xF0)
      return len(data) - back if back < length else len(data)
  return len(data)
