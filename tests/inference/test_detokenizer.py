"""Incremental text equals the text of all tokens, and no character is ever retracted."""

import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.tokenizer import open_tokenizer
from maxlite.inference.batcher import LENGTH, STOP, TokenEvent
from maxlite.inference.detokenizer import Detokenizer
from maxlite.inference.engine import GenerationRequest

REQUEST = GenerationRequest([0], 99)


def stream(text, *stop_strings):
  """(pieces of the text, finish reason) with a token per byte, up to the first stop string."""
  decode = open_tokenizer(DataConfig()).decode
  detokenizer = Detokenizer(decode, stop_strings)
  pieces = []
  reason = ""
  for n, byte in enumerate(text):
    last = ""
    if n == len(text) - 1:
      last = LENGTH
    piece, reason = detokenizer.push(TokenEvent(REQUEST, byte, last))
    pieces.append(piece)
    if reason:
      break
  return pieces, reason


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🌍!", "é"])
def test_a_character_is_released_with_its_last_byte(text):
  pieces, reason = stream(text.encode())
  assert ("".join(pieces), reason) == (text, LENGTH)
  assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
  last_bytes = [len(text[: n + 1].encode()) - 1 for n in range(len(text))]
  assert [n for n, piece in enumerate(pieces) if piece] == last_bytes


def test_invalid_bytes_are_released_at_the_end_at_the_latest():
  pieces, _ = stream(b"a\xffb\xc3")
  assert "".join(pieces) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
  ("text", "stop_strings", "kept"),
  [
    ("one two three", [" three"], "one two"),
    ("one two three", ["zzz", "two", " t"], "one"),
    ("aaab", ["aab"], "a"),
    ("aaab", ["aaaa"], "aaab"),
    ("ends with the beginning </e", ["</end>"], "ends with the beginning </e"),
    ("weiß nicht", ["ß"], "wei"),
  ],
)
def test_text_ends_before_the_first_stop_string(text, stop_strings, kept):
  pieces, reason = stream(text.encode(), *stop_strings)
  assert "".join(pieces) == kept
  assert reason == (STOP if kept != text else LENGTH)
  # Every intermediate text is a prefix of the final one.
  assert all(kept.startswith("".join(pieces[:n])) for n in range(len(pieces)))


def test_a_stop_token_has_no_text():
  detokenizer = Detokenizer(open_tokenizer(DataConfig()).decode)
  assert detokenizer.push(TokenEvent(REQUEST, ord("a"))) == ("a", "")
  assert detokenizer.push(TokenEvent(REQUEST, None, STOP)) == ("", STOP)
