"""Continuous batching: requests share an engine's rows and take one as soon as it is idle."""

import collections
import dataclasses
import time
from collections.abc import Sequence, Set
from typing import NamedTuple

import jax
import numpy as np

from maxlite.inference.engine import MAX_STEPS, NO_TOKEN, Engine, GenerationRequest

# Finish reasons: a stop token or string, or max_new_tokens.
STOP = "stop"
LENGTH = "length"
# Decode steps per engine call amortise dispatch overhead, but take at most this long, since tokens
# are returned and new requests admitted between calls.
_CALL_SECONDS = 0.02


class _InFlight(NamedTuple):
  """Tokens that the device still computes, with the requests of their rows."""

  token_NBT: jax.Array
  requests: list[GenerationRequest | None]


@dataclasses.dataclass(frozen=True)
class TokenEvent:
  """A new token of a request.

  Attributes:
    request: the request.
    token: the token; None for a stop token, which is not part of the completion.
    finish_reason: why this is the last token; "" if it is not.
    stop_token: the stop token, if there is one.
  """

  request: GenerationRequest
  token: int | None
  finish_reason: str = ""
  stop_token: int | None = None


@dataclasses.dataclass
class Throughput:
  """Tokens and seconds without compilation; the first token of a completion counts as prefill.

  Attributes:
    num_drafts: tokens that draft heads propose per step.
    prompt_tokens: tokens of prompts.
    new_tokens: tokens that decode steps generated.
    num_steps: decode steps that generated a token.
    row_steps: rows that generated a token, summed over steps.
    prefill_seconds: time of prefill.
    decode_seconds: time of decode steps.
  """

  num_drafts: int = 0
  prompt_tokens: int = 0
  new_tokens: int = 0
  num_steps: int = 0
  row_steps: int = 0
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0

  def __str__(self) -> str:
    prefill = _describe_rate(self.prompt_tokens, self.prefill_seconds)
    decode = _describe_rate(self.new_tokens, self.decode_seconds)
    rates = f"prefill {prefill}; decode {decode}"
    if not self.num_drafts:
      return rates
    drafted = f"{self.accepted_length:.2f} of {self.num_drafts} drafts accepted"
    return f"{rates}; {drafted}, {1 + self.accepted_length:.2f} tokens per step"

  @property
  def accepted_length(self) -> float:
    """Mean number of accepted drafts per step and row."""
    if not self.row_steps:
      return 0.0
    return self.new_tokens / self.row_steps - 1


def _describe_rate(num_tokens: int, seconds: float) -> str:
  rate = 0.0
  if num_tokens:
    rate = num_tokens / seconds
  return f"{num_tokens:,} tokens, {rate:,.0f} tok/s"


class Batcher:
  """Assigns requests to the rows of an engine; not thread-safe."""

  def __init__(self, engine: Engine) -> None:
    self.engine = engine
    self.throughput = Throughput(engine.num_drafts)
    self._request_by_row: list[GenerationRequest | None] = [None] * engine.num_rows
    self._remaining: dict[GenerationRequest, int] = {}
    # Two calls are in flight, so that the device does not wait while the host processes tokens.
    self._in_flight: collections.deque[_InFlight] = collections.deque()
    # Of requests that have ended, if the engine records them: the experts of every token that was
    # read, [tokens, MoE layers, K]; the last token of a completion is not.
    self.expert_ids: dict[GenerationRequest, np.ndarray] = {}

  @property
  def num_free(self) -> int:
    return self._request_by_row.count(None)

  @property
  def is_idle(self) -> bool:
    return not self._remaining

  @property
  def active(self) -> Set[GenerationRequest]:
    """The requests that have a row."""
    return self._remaining.keys()

  def add(self, requests: Sequence[GenerationRequest]) -> list[TokenEvent]:
    """Assign at most `num_free` requests to free rows and return their first tokens.

    Raises:
      UserError: no row can hold a request; then none is added.
    """
    if not requests:
      return []
    free = [row for row, request in enumerate(self._request_by_row) if request is None]
    rows = free[: len(requests)]
    start = time.perf_counter()
    compiled = self.engine.compile_seconds
    token_B = self.engine.prefill(requests, rows)
    compiling = self.engine.compile_seconds - compiled
    self.throughput.prefill_seconds += time.perf_counter() - start - compiling
    for row, request in zip(rows, requests, strict=True):
      self.throughput.prompt_tokens += len(request.prompt)
      self._request_by_row[row] = request
      self._remaining[request] = request.max_new_tokens
    return self._events(token_B[:, None], requests)

  def step(self) -> list[TokenEvent]:
    """Return the next tokens of all active requests."""
    start = time.perf_counter()
    compiled = self.engine.compile_seconds
    while len(self._in_flight) < 2:
      tokens = self.engine.step(self._steps_per_call())
      self._in_flight.append(_InFlight(tokens, list(self._request_by_row)))
    token_NBT, requests = self._in_flight.popleft()
    events: list[TokenEvent] = []
    for token_BT in np.asarray(token_NBT):
      step_events = self._events(token_BT, requests)
      events += step_events
      if np.any(token_BT != NO_TOKEN):
        self.throughput.num_steps += 1
      self.throughput.row_steps += len({event.request for event in step_events})
    if self.is_idle:
      self._in_flight.clear()
    compiling = self.engine.compile_seconds - compiled
    self.throughput.decode_seconds += time.perf_counter() - start - compiling
    self.throughput.new_tokens += len(events)
    return events

  def cancel(self, request: GenerationRequest) -> None:
    """End a request, if it has a row; its further tokens are not returned."""
    if request in self._remaining:
      self.engine.cancel(self._request_by_row.index(request))
      self._free(request)

  def reset(self) -> None:
    """Remove all requests and recover from any state that a failure left."""
    self._request_by_row = [None] * self.engine.num_rows
    self._remaining.clear()
    self._in_flight.clear()
    self.engine.reset()

  def _steps_per_call(self) -> int:
    measured = self.throughput
    # Several processes must make the same calls, and their clocks differ.
    if jax.process_count() > 1 or not measured.num_steps:
      return 1
    num_steps = _CALL_SECONDS * measured.num_steps / measured.decode_seconds
    return int(np.clip(num_steps, 1, MAX_STEPS))

  def _events(
    self, token_BT: np.ndarray, requests: Sequence[GenerationRequest | None]
  ) -> list[TokenEvent]:
    """The events of the tokens that each request's row has generated."""
    events: list[TokenEvent] = []
    for tokens, request in zip(token_BT.tolist(), requests, strict=True):
      if request is None or request not in self._remaining:  # cancelled in the meantime
        continue
      for token in tokens:
        if token != NO_TOKEN:
          events.append(self._event(token, request))
    return events

  def _event(self, token: int, request: GenerationRequest) -> TokenEvent:
    """Count a token of a request, and free its row after the last one."""
    self._remaining[request] -= 1
    if token in self.engine.stop_token_ids:
      self._free(request)
      return TokenEvent(request, None, STOP, stop_token=token)
    if not self._remaining[request]:
      self._free(request)
      return TokenEvent(request, token, LENGTH)
    return TokenEvent(request, token)

  def _free(self, request: GenerationRequest) -> None:
    row = self._request_by_row.index(request)
    num_new = request.max_new_tokens - self._remaining.pop(request)
    if self.engine.records_experts:
      length = len(request.prompt) + num_new - 1
      self.expert_ids[request] = self.engine.expert_ids(row, length)
    self._request_by_row[row] = None
