"""Incremental detokenization with stop strings."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from maxlite.inference.batcher import STOP, Batcher, TokenEvent
from maxlite.inference.engine import GenerationRequest

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from the bytes of an incomplete character
Decode = Callable[[Sequence[int]], str]  # token ids to text


class NewText(NamedTuple):
  """What a token adds to a completion.

  Attributes:
    text: text that has become final.
    finish_reason: why the completion ends with this text; "" if it does not.
  """

  text: str
  finish_reason: str


class Detokenizer:
  """Converts the tokens of one request to text, cut before the first of its stop strings.

  Text is held back while its last character is incomplete or its end may begin a stop string.
  """

  def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
    self._decode = decode
    self._stop_strings = [stop for stop in stop_strings if stop]
    self._ids: list[int] = []
    # The text of the ids before `_done` is final. Decoding starts at `_start`, since the text of a
    # token may depend on the previous one.
    self._start = 0
    self._done = 0
    self._held = ""
    self.is_stopped = False

  def push(self, event: TokenEvent) -> NewText:
    """Add a token of the request and return the text that becomes final."""
    text = ""
    if event.token is not None:
      self._ids.append(event.token)
      decoded = self._decode(self._ids[self._start :])
      if not decoded.endswith(_INCOMPLETE):
        text = self._release(decoded)
    if event.finish_reason:
      text += self._release(self._decode(self._ids[self._start :]))
      text += self._held
      self._held = ""
    if self.is_stopped:
      return NewText(text, STOP)
    return NewText(text, event.finish_reason)

  def _release(self, text: str) -> str:
    """Return what is new in `text`, the text from `_start`, and cannot begin a stop string."""
    previous = self._decode(self._ids[self._start : self._done])
    self._start = self._done
    self._done = len(self._ids)
    if self.is_stopped:
      return ""
    self._held += text[len(previous) :]
    end = self._first_stop()
    if end is not None:
      released = self._held[:end]
      self._held = ""
      self.is_stopped = True
      return released
    end = len(self._held) - self._num_held_back()
    released = self._held[:end]
    self._held = self._held[end:]
    return released

  def _first_stop(self) -> int | None:
    """Return where the first stop string begins in the held text; None if it has none."""
    positions = [self._held.find(stop) for stop in self._stop_strings]
    return min((position for position in positions if position >= 0), default=None)

  def _num_held_back(self) -> int:
    """Return how many characters at the end of the held text may begin a stop string."""
    longest = 0
    for stop in self._stop_strings:
      for length in range(1, len(stop)):
        if self._held.endswith(stop[:length]):
          longest = max(longest, length)
    return longest


class CompletionText(NamedTuple):
  """Text of a completion that has become final.

  Attributes:
    request: the request that is completed.
    text: the new text.
    finish_reason: why the completion ends with this text; "" if it does not.
  """

  request: GenerationRequest
  text: str
  finish_reason: str


def stream_completions(
  batcher: Batcher,
  requests: Iterable[GenerationRequest],
  decode: Decode,
  stop_strings: Sequence[str] = (),
) -> Iterator[CompletionText]:
  """Run `requests` and yield their texts as these become final."""
  waiting = collections.deque(requests)
  detokenizers: dict[GenerationRequest, Detokenizer] = {}
  while waiting or not batcher.is_idle:
    admitted: list[GenerationRequest] = []
    while waiting and len(admitted) < batcher.num_free:
      request = waiting.popleft()
      admitted.append(request)
      detokenizers[request] = Detokenizer(decode, stop_strings)
    for event in batcher.add(admitted) or batcher.step():
      if event.request not in detokenizers:  # stopped before this token
        continue
      text, finish_reason = detokenizers[event.request].push(event)
      if finish_reason:
        batcher.cancel(event.request)
        del detokenizers[event.request]
      if text or finish_reason:
        yield CompletionText(event.request, text, finish_reason)
