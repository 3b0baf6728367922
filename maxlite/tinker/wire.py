"""The wire format of protocol buffers: fields of a message from bytes, and to bytes.

Source: https://protobuf.dev/programming-guides/encoding.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# An int of a varint, the bytes of everything else.
Value = int | bytes


class WireError(ValueError):
  """Bytes that are not a message."""


def read_fields(data: bytes) -> Iterator[tuple[int, Value]]:
  """Yield (number, value) of every field of a message.

  Raises:
    WireError: the bytes are not a message.
  """
  at = 0
  while at < len(data):
    tag, at = _read_varint(data, at)
    kind = tag & 7
    if kind == _VARINT:
      number, at = _read_varint(data, at)
      yield tag >> 3, number
      continue
    if kind == _BYTES:
      size, at = _read_varint(data, at)
    elif kind in (_FIXED64, _FIXED32):
      size = 8 if kind == _FIXED64 else 4
    else:
      raise WireError(f"a field of type {kind}")
    if size > len(data) - at:
      raise WireError("a field that is longer than its message")
    yield tag >> 3, data[at : at + size]
    at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
  value = 0
  for n in range(10):
    if at + n >= len(data):
      raise WireError("a number that is cut off")
    byte = data[at + n]
    value |= (byte & 0x7F) << (7 * n)
    if byte < 0x80:
      return value & (2**64 - 1), at + n + 1
  raise WireError("a number of more than ten bytes")


def as_bytes(value: Value) -> bytes:
  if isinstance(value, int):
    raise WireError("a number in place of bytes")
  return value


def as_text(value: Value) -> str:
  try:
    return as_bytes(value).decode()
  except UnicodeDecodeError:
    raise WireError("a text that is not UTF-8") from None


def as_int(value: Value) -> int:
  """A signed integer."""
  if not isinstance(value, int):
    raise WireError("bytes in place of a number")
  return value - 2**64 if value >= 2**63 else value


def as_double(value: Value) -> float:
  data = as_bytes(value)
  if len(data) != 8:
    raise WireError("a double that has not eight bytes")
  return float(struct.unpack("<d", data)[0])


def as_ints(value: Value) -> list[int]:
  """The integers of a repeated field, packed or one of several."""
  if isinstance(value, int):
    return [as_int(value)]
  numbers = []
  at = 0
  while at < len(value):
    number, at = _read_varint(value, at)
    numbers.append(as_int(number))
  return numbers


def as_entry(value: Value) -> tuple[str, Value]:
  """(key, value) of an entry of a map from texts."""
  key = ""
  found: Value = b""
  for number, field in read_fields(as_bytes(value)):
    if number == 1:
      key = as_text(field)
    elif number == 2:
      found = field
  return key, found


def int_field(number: int, value: int) -> bytes:
  return _varint(number << 3 | _VARINT) + _varint(value & (2**64 - 1))


def bytes_field(number: int, value: bytes) -> bytes:
  return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def text_field(number: int, value: str) -> bytes:
  return bytes_field(number, value.encode())


def double_map(number: int, values: Mapping[str, float]) -> bytes:
  entries = []
  for key, value in values.items():
    double = _varint(2 << 3 | _FIXED64) + struct.pack("<d", value)
    entries.append(bytes_field(number, text_field(1, key) + double))
  return b"".join(entries)


def packed_ints(number: int, values: Iterable[int]) -> bytes:
  return bytes_field(number, b"".join(_varint(value & (2**64 - 1)) for value in values))


def _varint(value: int) -> bytes:
  parts = bytearray()
  while value >= 0x80:
    parts.append(value & 0x7F | 0x80)
    value >>= 7
  parts.append(value)
  return bytes(parts)
