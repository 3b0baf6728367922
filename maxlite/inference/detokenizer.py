"""Incremental detokenization with stop strings."""

import collections
from collections.abc import Iterable, Iterator, Sequence, Set
from typing import NamedTuple, Protocol

from maxlite.inference.batcher import STOP, Batcher, TokenEvent
from maxlite.inference.engine import GenerationRequest

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # decoded from the bytes of an incomplete character


class TokenDecoder(Protocol):
  """The part of a tokenizer that converts tokens to text; see `maxlite.data.tokenizer`."""

  @property
  def byte_ids(self) -> Set[int]: ...

  def decode(self, ids: Sequence[int]) -> str: ...


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

  The pieces of text, joined, are what the tokenizer decodes from all tokens at once, without what
  it decodes from the prompt alone. Text is held back while further tokens may change it, or its end
  may begin a stop string.

  Args:
    tokenizer: decodes the tokens.
    prompt: the tokens before the completion. The first word of a completion keeps its space only
      if it is decoded after other text.
    stop_strings: texts that end the completion.
  """

  def __init__(
    self, tokenizer: TokenDecoder, prompt: Sequence[int], stop_strings: Sequence[str] = ()
  ) -> None:
    self._decode = tokenizer.decode
    self._byte_ids = tokenizer.byte_ids
    self._stop_strings = [stop for stop in stop_strings if stop]
    self._held = ""  # final text that may begin a stop string
    self.is_stopped = False
    self._set_context(prompt)

  def push(self, event: TokenEvent) -> NewText:
    """Add a token of the request and return the text that becomes final."""
    text = ""
    if not self.is_stopped:
      if event.token is not None:
        self._add(event.token)
      text = self._release(is_last=bool(event.finish_reason))
    if self.is_stopped:
      return NewText(text, STOP)
    return NewText(text, event.finish_reason)

  def _set_context(self, tokens: Sequence[int]) -> None:
    """Keep the end of `tokens`, whose text is final, as the context of the next tokens.

    It has separate text (else it is all of `tokens`), which is more than incomplete characters,
    so that no character of the next tokens spans its beginning.
    """
    length = 0
    text = ""
    while not text.strip(_INCOMPLETE) and length < len(tokens):
      length = min(2 * length + 1, len(tokens))
      text = self._decode(tokens[-length:])
    self._context = list(tokens[len(tokens) - length :])
    self._context_text = text
    self._pending: list[int] = []  # tokens after the context, whose text is not final
    self._decoded = text  # of the context and the pending tokens

  def _add(self, token: int) -> None:
    """Add a token, unless it has no text of any kind, as special tokens."""
    decoded = self._decode([*self._context, *self._pending, token])
    is_complete = not decoded.endswith(_INCOMPLETE)
    if decoded and decoded == self._decoded and is_complete:
      return
    self._pending.append(token)
    self._decoded = decoded

  def _release(self, *, is_last: bool) -> str:
    """Return the text that is final and cannot begin a stop string."""
    if self._decoded.endswith(_INCOMPLETE) and not is_last:
      return ""
    known = self._context_text
    if not self._decoded.startswith(known):  # the completion completes a character of the prompt
      known = known.rstrip(_INCOMPLETE)
    text = self._held + self._decoded[len(known) :]
    stop = self._first_stop(text)
    if stop is not None:
      self.is_stopped = True
      return text[:stop]
    if is_last:
      return text
    if self._pending and self._pending[-1] in self._byte_ids:
      return ""
    self._set_context([*self._context, *self._pending])
    end = len(text) - self._num_held_back(text)
    self._held = text[end:]
    return text[:end]

  def _first_stop(self, text: str) -> int | None:
    """Return where the first stop string begins in `text`; None if it has none."""
    positions = [text.find(stop) for stop in self._stop_strings]
    return min((position for position in positions if position >= 0), default=None)

  def _num_held_back(self, text: str) -> int:
    """Return how many characters at the end of `text` may begin a stop string."""
    longest = 0
    for stop in self._stop_strings:
      for length in range(1, len(stop)):
        if text.endswith(stop[:length]):
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
  tokenizer: TokenDecoder,
  stop_strings: Sequence[str] = (),
) -> Iterator[CompletionText]:
  """Run `requests` and yield their texts as these become final."""
  waiting = collections.deque(requests)
  detokenizers: dict[GenerationRequest, Detokenizer] = {}
  num_tokens: collections.Counter[GenerationRequest] = collections.Counter()
  while waiting or not batcher.is_idle:
    admitted: list[GenerationRequest] = []
    while waiting and len(admitted) < batcher.num_free:
      request = waiting.popleft()
      admitted.append(request)
      detokenizers[request] = Detokenizer(tokenizer, request.prompt, stop_strings)
    for event in batcher.add(admitted) or batcher.step():
      if event.request not in detokenizers:  # stopped before this token
        continue
      num_tokens[event.request] += 1
      text, finish_reason = detokenizers[event.request].push(event)
      if finish_reason:
        batcher.cancel(event.request)
        del detokenizers[event.request]
        if event.request in batcher.expert_ids:
          # A call may have decoded tokens after a stop string.
          length = len(event.request.prompt) + num_tokens[event.request] - 1
          batcher.expert_ids[event.request] = batcher.expert_ids[event.request][:length]
      if text or finish_reason:
        yield CompletionText(event.request, text, finish_reason)
