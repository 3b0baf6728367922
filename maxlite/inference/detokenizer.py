"""Incremental detokenization with stop strings."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence

from maxlite.inference.batcher import STOP, Batcher, TokenEvent
from maxlite.inference.engine import GenerationRequest

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from the bytes of an incomplete character
Decode = Callable[[Sequence[int]], str]  # token ids to text


class Detokenizer:
  """Converts the tokens of one request to text, cut before the first of its stop strings.

  Text is held back while its last character is incomplete or its end may begin a stop string.
  """

  def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
    self._decode, self._stop_strings = decode, [stop for stop in stop_strings if stop]
    self._ids: list[int] = []
    # The text of the ids before `_done` is final. Decoding starts at `_start`, since the text of a
    # token may depend on the previous one.
    self._start = self._done = 0
    self._held = ""
    self.is_stopped = False

  def push(self, event: TokenEvent) -> tuple[str, str]:
    """Return (new text, finish reason or "")."""
    text = ""
    if event.token is not None:
      self._ids.append(event.token)
      decoded = self._decode(self._ids[self._start :])
      text = "" if decoded.endswith(_INCOMPLETE) else self._release(decoded)
    if event.finish_reason:
      text += self._release(self._decode(self._ids[self._start :])) + self._held
      self._held = ""
    return text, STOP if self.is_stopped else event.finish_reason

  def _release(self, text: str) -> str:
    """Return what is new in `text`, the text from `_start`, and cannot begin a stop string."""
    previous = self._decode(self._ids[self._start : self._done])
    self._start, self._done = self._done, len(self._ids)
    self._held += text[len(previous) :]
    stops = [self._held.find(stop) for stop in self._stop_strings if stop in self._held]
    if stops or self.is_stopped:
      released, self._held = self._held[: min(stops, default=0)], ""
      released, self.is_stopped = ("" if self.is_stopped else released), True
      return released
    end = len(self._held) - self._num_held_back()
    released, self._held = self._held[:end], self._held[end:]
    return released

  def _num_held_back(self) -> int:
    """Return how many characters at the end of the held text may begin a stop string."""
    begins = (stop[:n] for stop in self._stop_strings for n in range(1, len(stop)))
    return max((len(begin) for begin in begins if self._held.endswith(begin)), default=0)


def stream_completions(
  batcher: Batcher,
  requests: Iterable[GenerationRequest],
  decode: Decode,
  stop_strings: Sequence[str] = (),
) -> Iterator[tuple[GenerationRequest, str, str]]:
  """Run `requests` and yield (request, new text, finish reason or "") as text becomes final."""
  waiting = collections.deque(requests)
  detokenizers: dict[GenerationRequest, Detokenizer] = {}
  while waiting or not batcher.is_idle:
    admitted = [waiting.popleft() for _ in range(min(batcher.num_free, len(waiting)))]
    detokenizers |= {request: Detokenizer(decode, stop_strings) for request in admitted}
    for event in batcher.add(admitted) or batcher.step():
      if event.request not in detokenizers:  # stopped before this token
        continue
      text, finish_reason = detokenizers[event.request].push(event)
      if finish_reason:
        batcher.cancel(event.request)
        del detokenizers[event.request]
      if text or finish_reason:
        yield event.request, text, finish_reason
