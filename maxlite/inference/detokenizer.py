"""Text out of tokens, as early as it is certain."""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence

from maxlite.inference.batcher import END, Batcher, Event
from maxlite.inference.engine import Request

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what bytes that are no whole character decode to


class TextStream:
  """The text of one request, cut before the first of its stop strings.

  A character whose bytes are not all there yet is waited for, and so is what may turn out to be the
  beginning of a stop string.

  Args:
    decode: from token ids to text.
  """

  def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
    self._decode, self._stops = decode, [stop for stop in stops if stop]
    self._ids: list[int] = []
    # Of all ids, text of those before `_done` is known. It is decoded from `_start` on, since what
    # a token spells may depend on the one before it.
    self._start = self._done = 0
    self._held = ""
    self.is_stopped = False

  def take(self, event: Event) -> tuple[str, str]:
    """(text that is certain now, why it ends here or "")."""
    text = "" if event.token is None else self._push(event.token)
    if event.reason:
      text += self._finish()
    return text, END if self.is_stopped else event.reason

  def _push(self, token: int) -> str:
    self._ids.append(token)
    text = self._decode(self._ids[self._start :])
    if text.endswith(_UNFINISHED):
      return ""
    return self._pass(text)

  def _finish(self) -> str:
    """All text that was waited for."""
    rest = self._pass(self._decode(self._ids[self._start :]))
    rest, self._held = rest + self._held, ""
    return rest

  def _pass(self, text: str) -> str:
    """What of the text from `_start` on is new, and no beginning of a stop string."""
    known = self._decode(self._ids[self._start : self._done])
    self._start, self._done = self._done, len(self._ids)
    self._held += text[len(known) :]
    ends = [self._held.find(stop) for stop in self._stops if stop in self._held]
    if ends or self.is_stopped:
      passed, self._held = self._held[: min(ends, default=0)], ""
      passed, self.is_stopped = ("" if self.is_stopped else passed), True
      return passed
    certain = len(self._held) - self._num_maybe_stop()
    passed, self._held = self._held[:certain], self._held[certain:]
    return passed

  def _num_maybe_stop(self) -> int:
    """Characters at the end of what is held that are the beginning of a stop string."""
    longest = max(map(len, self._stops), default=1) - 1
    for num in range(min(longest, len(self._held)), 0, -1):
      if any(stop.startswith(self._held[-num:]) for stop in self._stops):
        return num
    return 0


def stream_texts(
  batcher: Batcher,
  requests: Iterable[Request],
  decode: Callable[[Sequence[int]], str],
  stops: Sequence[str] = (),
) -> Iterator[tuple[Request, str, str]]:
  """(request, more of its text, why that ends here or "") as text becomes certain."""
  waiting = collections.deque(requests)
  streams: dict[Request, TextStream] = {}
  while waiting or not batcher.is_idle:
    admitted = [waiting.popleft() for _ in range(min(batcher.num_free, len(waiting)))]
    streams |= {request: TextStream(decode, stops) for request in admitted}
    for event in batcher.add(admitted) or batcher.step():
      if event.request not in streams:  # its text has ended before this token
        continue
      text, reason = streams[event.request].take(event)
      if reason:
        batcher.drop(event.request)
        del streams[event.request]
      if text or reason:
        yield event.request, text, reason
