"""Text that comes token by token is the text of all tokens, and never shows what it takes back."""

import pytest

from maxlite.config.schema import DataConfig
from maxlite.data.tokenizers.tokenizer import open_tokenizer
from maxlite.inference.batcher import END, LENGTH, Event
from maxlite.inference.detokenizer import TextStream
from maxlite.inference.engine import Request

REQUEST = Request([0], 99)


def stream(text, *stops):
  """(pieces of the text, why it ended), a byte a token, as far as anyone would go on."""
  decode = open_tokenizer(DataConfig()).decode
  pieces, reason, writer = [], "", TextStream(decode, stops)
  for n, byte in enumerate(text):
    last = LENGTH if n == len(text) - 1 else ""
    piece, reason = writer.take(Event(REQUEST, byte, last))
    pieces.append(piece)
    if reason:
      break
  return pieces, reason


@pytest.mark.parametrize("text", ["plain", "Grüße, 世界 🌍!", "é"])
def test_a_character_comes_when_its_last_byte_does(text):
  pieces, reason = stream(text.encode())
  assert ("".join(pieces), reason) == (text, LENGTH)
  assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
  ends = [len(text[: n + 1].encode()) - 1 for n in range(len(text))]
  assert [n for n, piece in enumerate(pieces) if piece] == ends


def test_bytes_that_are_no_character_come_at_the_latest_with_the_end():
  pieces, _ = stream(b"a\xffb\xc3")
  assert "".join(pieces) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
  ("text", "stops", "shown"),
  [
    ("one two three", [" three"], "one two"),
    ("one two three", ["zzz", "two", " t"], "one"),
    ("aaab", ["aab"], "a"),
    ("aaab", ["aaaa"], "aaab"),
    ("ends with the beginning </e", ["</end>"], "ends with the beginning </e"),
    ("weiß nicht", ["ß"], "wei"),
  ],
)
def test_text_ends_before_the_first_stop_string_and_shows_nothing_of_it(text, stops, shown):
  pieces, reason = stream(text.encode(), *stops)
  assert "".join(pieces) == shown
  assert reason == (END if shown != text else LENGTH)
  # Whatever was shown at any time is the beginning of the text.
  assert all(shown.startswith("".join(pieces[:n])) for n in range(len(pieces)))


def test_the_end_token_is_no_text():
  writer = TextStream(open_tokenizer(DataConfig()).decode)
  assert writer.take(Event(REQUEST, ord("a"))) == ("a", "")
  assert writer.take(Event(REQUEST, None, END)) == ("", END)
