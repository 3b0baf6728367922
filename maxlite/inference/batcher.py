"""Continuous batching: requests share an engine's rows, and take one as soon as it is free."""

import collections
import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from maxlite.inference.engine import MAX_STEPS, NONE, Engine, Request

END, LENGTH = "stop", "length"  # why a text ended: the end token, or max_new_tokens
# What is asked of the engine at once: of short steps many, for each call costs time of its own; and
# not more than may pass until the next tokens are seen, and the next request gets a row.
_CALL_SECONDS = 0.02


@dataclasses.dataclass(frozen=True)
class Event:
  """One more token of a request's text; None for the end token, which is no part of it."""

  request: Request
  token: int | None
  reason: str = ""  # why the text ends with this token; "" while it goes on


@dataclasses.dataclass
class Meter:
  """How many tokens took how long, compiling aside; a text's first token counts as prefill."""

  num_drafts: int = 0
  prompt_tokens: int = 0
  new_tokens: int = 0
  num_steps: int = 0
  row_steps: int = 0  # of a step, one for each row that drew a token
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0

  def __str__(self) -> str:
    prefill = self.prompt_tokens / self.prefill_seconds if self.prompt_tokens else 0
    decode = self.new_tokens / self.decode_seconds if self.new_tokens else 0
    rates = (
      f"prefill {self.prompt_tokens:,} tokens, {prefill:,.0f} tok/s; "
      f"decode {self.new_tokens:,} tokens, {decode:,.0f} tok/s"
    )
    if not self.num_drafts:
      return rates
    drafted = f"{self.accepted_length:.2f} of {self.num_drafts} drafts accepted"
    return f"{rates}; {drafted}, {1 + self.accepted_length:.2f} tokens a step"

  @property
  def accepted_length(self) -> float:
    """Drafts that a step adds to a row's text, on average."""
    return self.new_tokens / self.row_steps - 1 if self.row_steps else 0.0


class Batcher:
  """Requests in the rows of an engine; not for more than one thread."""

  def __init__(self, engine: Engine) -> None:
    self.engine, self.meter = engine, Meter(engine.num_drafts)
    self._request_by_row: list[Request | None] = [None] * engine.num_rows
    self._num_left: dict[Request, int] = {}
    # Tokens that are being computed, with the requests of their rows. Some are always under way, so
    # that the device need not wait for what is done with the tokens.
    self._under_way: collections.deque[tuple[jax.Array, list]] = collections.deque()

  @property
  def num_free(self) -> int:
    return self._request_by_row.count(None)

  @property
  def is_idle(self) -> bool:
    return not self._num_left

  def add(self, requests: Sequence[Request]) -> list[Event]:
    """The first tokens of `requests`, at most `num_free`, whose rows they take.

    Raises:
      UserError: a request that no row can hold; then none is added.
    """
    if not requests:
      return []
    free = [row for row, request in enumerate(self._request_by_row) if request is None]
    rows = free[: len(requests)]
    start, compiled = time.perf_counter(), self.engine.compile_seconds
    tokens = np.asarray(self.engine.admit(requests, rows))
    compiling = self.engine.compile_seconds - compiled
    self.meter.prefill_seconds += time.perf_counter() - start - compiling
    self.meter.prompt_tokens += sum(len(request.prompt) for request in requests)
    for row, request in zip(rows, requests, strict=True):
      self._request_by_row[row] = request
      self._num_left[request] = request.max_new_tokens
    return self._events(tokens[:, None], requests)

  def step(self) -> list[Event]:
    """What the next steps draw for all rows that are taken."""
    start, compiled = time.perf_counter(), self.engine.compile_seconds
    while len(self._under_way) < 2:
      tokens = self.engine.step(self._num_steps())
      self._under_way.append((tokens, list(self._request_by_row)))
    tokens, requests = self._under_way.popleft()
    events = []
    for token_BT in np.asarray(tokens):
      of_step = self._events(token_BT, requests)
      self.meter.num_steps += bool(np.any(token_BT != NONE))
      self.meter.row_steps += len({event.request for event in of_step})
      events += of_step
    if self.is_idle:
      self._under_way.clear()
    compiling = self.engine.compile_seconds - compiled
    self.meter.decode_seconds += time.perf_counter() - start - compiling
    self.meter.new_tokens += len(events)
    return events

  def _num_steps(self) -> int:
    meter = self.meter
    if jax.process_count() > 1:  # processes must ask alike, and their clocks differ
      return 1
    at_once = _CALL_SECONDS * meter.num_steps / meter.decode_seconds if meter.num_steps else 1
    return int(np.clip(at_once, 1, MAX_STEPS))

  def drop(self, request: Request) -> None:
    """Ends a request before its time."""
    if request in self._num_left:
      self.engine.stop(self._request_by_row.index(request))
      self._end(request)

  def clear(self) -> None:
    """Ends all requests, whatever state a failure left them and the engine in."""
    self._request_by_row = [None] * self.engine.num_rows
    self._num_left.clear()
    self._under_way.clear()
    self.engine.clear()

  def _events(self, token_BT: np.ndarray, requests: Sequence[Request | None]) -> list[Event]:
    events = []
    for tokens, request in zip(token_BT.tolist(), requests, strict=True):
      if tokens[0] == NONE or request not in self._num_left:  # or it was dropped meanwhile
        continue
      events += [self._event(token, request) for token in tokens if token != NONE]
    return events

  def _event(self, token: int, request: Request) -> Event:
    self._num_left[request] -= 1
    is_end = token in self.engine.ends
    reason = END if is_end else "" if self._num_left[request] else LENGTH
    if reason:
      self._end(request)
    return Event(request, None if is_end else token, reason)

  def _end(self, request: Request) -> None:
    del self._num_left[request]
    self._request_by_row[self._request_by_row.index(request)] = None
