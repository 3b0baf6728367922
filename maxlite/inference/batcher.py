"""Continuous batching: requests share an engine's rows and take one as soon as it is idle."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Sequence, Set

import jax
import numpy as np

from maxlite.inference.engine import MAX_STEPS, NO_TOKEN, Engine, GenerationRequest

STOP, LENGTH = "stop", "length"  # finish reasons: a stop token or string, or max_new_tokens
# Decode steps per engine call amortise dispatch overhead, but take at most this long, since tokens
# are returned and new requests admitted between calls.
_CALL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class TokenEvent:
  """A new token of a request; None for a stop token, which is not part of the completion."""

  request: GenerationRequest
  token: int | None
  finish_reason: str = ""  # set if this is the last token


@dataclasses.dataclass
class Throughput:
  """Tokens and seconds without compilation; the first token of a completion counts as prefill."""

  num_drafts: int = 0
  prompt_tokens: int = 0
  new_tokens: int = 0
  num_steps: int = 0
  row_steps: int = 0  # summed over steps: rows that generated a token
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0

  def __str__(self) -> str:
    rate = lambda n, seconds: f"{n:,} tokens, {n / seconds if n else 0:,.0f} tok/s"
    prefill = rate(self.prompt_tokens, self.prefill_seconds)
    rates = f"prefill {prefill}; decode {rate(self.new_tokens, self.decode_seconds)}"
    if not self.num_drafts:
      return rates
    drafted = f"{self.accepted_length:.2f} of {self.num_drafts} drafts accepted"
    return f"{rates}; {drafted}, {1 + self.accepted_length:.2f} tokens per step"

  @property
  def accepted_length(self) -> float:
    """Mean number of accepted drafts per step and row."""
    return self.new_tokens / self.row_steps - 1 if self.row_steps else 0.0


class Batcher:
  """Assigns requests to the rows of an engine; not thread-safe."""

  def __init__(self, engine: Engine) -> None:
    self.engine, self.throughput = engine, Throughput(engine.num_drafts)
    self._request_by_row: list[GenerationRequest | None] = [None] * engine.num_rows
    self._remaining: dict[GenerationRequest, int] = {}
    # Tokens still being computed, with the requests of their rows. Two calls are in flight, so that
    # the device does not wait while the host processes tokens.
    self._in_flight: collections.deque[tuple[jax.Array, list]] = collections.deque()

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
    free = (row for row, request in enumerate(self._request_by_row) if request is None)
    rows = list(itertools.islice(free, len(requests)))
    start, compiled = time.perf_counter(), self.engine.compile_seconds
    tokens = np.asarray(self.engine.prefill(requests, rows))
    compiling = self.engine.compile_seconds - compiled
    self.throughput.prefill_seconds += time.perf_counter() - start - compiling
    self.throughput.prompt_tokens += sum(len(request.prompt) for request in requests)
    for row, request in zip(rows, requests, strict=True):
      self._request_by_row[row] = request
      self._remaining[request] = request.max_new_tokens
    return self._events(tokens[:, None], requests)

  def step(self) -> list[TokenEvent]:
    """Return the next tokens of all active requests."""
    start, compiled = time.perf_counter(), self.engine.compile_seconds
    while len(self._in_flight) < 2:
      tokens = self.engine.step(self._steps_per_call())
      self._in_flight.append((tokens, list(self._request_by_row)))
    tokens, requests = self._in_flight.popleft()
    events = []
    for token_BT in np.asarray(tokens):
      step_events = self._events(token_BT, requests)
      self.throughput.num_steps += bool(np.any(token_BT != NO_TOKEN))
      self.throughput.row_steps += len({event.request for event in step_events})
      events += step_events
    if self.is_idle:
      self._in_flight.clear()
    compiling = self.engine.compile_seconds - compiled
    self.throughput.decode_seconds += time.perf_counter() - start - compiling
    self.throughput.new_tokens += len(events)
    return events

  def cancel(self, request: GenerationRequest) -> None:
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
    return [
      self._event(token, request)
      for tokens, request in zip(token_BT.tolist(), requests, strict=True)
      if request in self._remaining  # else cancelled in the meantime
      for token in tokens
      if token != NO_TOKEN
    ]

  def _event(self, token: int, request: GenerationRequest) -> TokenEvent:
    self._remaining[request] -= 1
    is_stop = token in self.engine.stop_token_ids
    finish_reason = STOP if is_stop else "" if self._remaining[request] else LENGTH
    if finish_reason:
      self._free(request)
    return TokenEvent(request, None if is_stop else token, finish_reason)

  def _free(self, request: GenerationRequest) -> None:
    del self._remaining[request]
    self._request_by_row[self._request_by_row.index(request)] = None
