"""Continuous batching: requests share an engine's rows, and take one as soon as it is free."""

import collections
import dataclasses
import time
from collections.abc import Sequence

import jax
import numpy as np

from maxlite.generation.engine import NONE, Engine, Request

END, LENGTH = "stop", "length"  # why a text ended: the end token, or max_new_tokens


@dataclasses.dataclass(frozen=True)
class Event:
  """One more token of a request's text; None for the end token, which is no part of it."""

  request: Request
  token: int | None
  reason: str = ""  # why the text ends with this token; "" while it goes on


@dataclasses.dataclass
class Meter:
  """How many tokens took how long, compiling aside; a text's first token counts as prefill."""

  prompt_tokens: int = 0
  new_tokens: int = 0
  prefill_seconds: float = 0.0
  decode_seconds: float = 0.0

  def __str__(self) -> str:
    prefill = self.prompt_tokens / self.prefill_seconds if self.prompt_tokens else 0
    decode = self.new_tokens / self.decode_seconds if self.new_tokens else 0
    return (
      f"prefill {self.prompt_tokens:,} tokens, {prefill:,.0f} tok/s; "
      f"decode {self.new_tokens:,} tokens, {decode:,.0f} tok/s"
    )


class Batcher:
  """Requests in the rows of an engine; not for more than one thread."""

  def __init__(self, engine: Engine) -> None:
    self.engine, self.meter = engine, Meter()
    self._request_by_row: list[Request | None] = [None] * engine.num_rows
    self._num_left: dict[Request, int] = {}
    # Tokens that are being computed, with the requests of their rows. One step is always under way,
    # so that the device need not wait for what is done with the tokens.
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
      ValueError: a request that no row can hold; then none is added.
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
    return self._events(tokens, requests)

  def step(self) -> list[Event]:
    """What the next step draws for all rows that are taken."""
    start, compiled = time.perf_counter(), self.engine.compile_seconds
    while len(self._under_way) < 2:
      self._under_way.append((self.engine.step(), list(self._request_by_row)))
    tokens, requests = self._under_way.popleft()
    events = self._events(np.asarray(tokens), requests)
    if self.is_idle:
      self._under_way.clear()
    compiling = self.engine.compile_seconds - compiled
    self.meter.decode_seconds += time.perf_counter() - start - compiling
    self.meter.new_tokens += len(events)
    return events

  def drop(self, request: Request) -> None:
    """Ends a request before its time."""
    if request in self._num_left:
      self.engine.stop(self._request_by_row.index(request))
      self._end(request)

  def _events(self, tokens: np.ndarray, requests: Sequence[Request | None]) -> list[Event]:
    return [
      self._event(int(token), request)
      for token, request in zip(tokens, requests, strict=True)
      if token != NONE and request in self._num_left  # else it was dropped meanwhile
    ]

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
