"""The thread that runs the engine: it takes requests from other threads and returns tokens."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from maxlite.errors import UserError
from maxlite.inference.batcher import Batcher, TokenEvent
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.scoring import TokenScore

Event = TokenEvent | Exception
OnEvent = Callable[[Event], None]  # called in the engine's thread


class _Scoring(NamedTuple):
  """Tokens to score, see `Engine.score`, and the future result."""

  tokens: Sequence[int]
  num_top: int
  result: Future[list[TokenScore | None]]


class QueueFullError(Exception):
  """The queue of waiting requests is full."""


class EngineThread:
  """Runs a batcher in its own thread, behind a queue of at most `queue_size` requests.

  The thread first compiles all programs that a request may need, while requests wait. An error in a
  step is passed to all requests in progress, and the thread continues.

  Args:
    batcher: assigns requests to the rows of its engine.
    queue_size: requests that may wait.
    on_ready: called in the thread, once the programs are compiled.
  """

  def __init__(
    self, batcher: Batcher, queue_size: int, on_ready: Callable[[], object] = lambda: None
  ) -> None:
    self._batcher = batcher
    self._on_ready = on_ready
    self.throughput = batcher.throughput
    self.num_rows = batcher.engine.num_rows
    self.max_active = self.num_rows + queue_size
    self.is_ready = False
    self.compile_error: Exception | None = None  # without programs, no request can be answered
    self._changed = threading.Condition()
    # Guarded by the condition: unfinished requests in order of arrival. The first have rows.
    self._on_event: dict[GenerationRequest, OnEvent] = {}
    self._scorings: collections.deque[_Scoring] = collections.deque()
    self._is_closing = False

  @contextlib.contextmanager
  def running(self) -> Iterator["EngineThread"]:
    """Run the thread inside the block."""
    thread = threading.Thread(target=self._run, name="generation", daemon=True)
    thread.start()
    try:
      yield self
    finally:
      with self._changed:
        self._is_closing = True
        self._changed.notify()
      thread.join()

  def check_number(self, num_prompts: int) -> None:
    """Raise UserError if one request may not have this number of prompts."""
    if num_prompts > self.max_active:
      raise UserError(
        f"{num_prompts} prompts are more than the {self.max_active} that the server accepts "
        "(decode_batch_size and serve_queue_size): send fewer in one request"
      )

  def check(self, request: GenerationRequest) -> None:
    """Raise UserError if no row can hold a request."""
    self._batcher.engine.check(request)

  def submit(self, on_event: dict[GenerationRequest, OnEvent]) -> None:
    """Accept all of these requests, which `check` accepts, or none.

    Raises:
      UserError: there are more than are ever accepted.
      QueueFullError: the queue has no room for them.
    """
    self.check_number(len(on_event))
    with self._changed:
      if self.num_active + len(on_event) > self.max_active:
        raise QueueFullError("too many requests are waiting: try again later")
      self._on_event |= on_event
      self._changed.notify()

  @property
  def num_active(self) -> int:
    """Number of requests waiting or in progress."""
    return len(self._on_event) + len(self._scorings)

  def score(self, tokens: Sequence[int], num_top: int) -> Future[list[TokenScore | None]]:
    """Score the tokens of a finished request between two steps of the others."""
    result: Future[list[TokenScore | None]] = Future()
    with self._changed:
      self._scorings.append(_Scoring(tokens, num_top, result))
      self._changed.notify()
    return result

  def fail_all(self, error: Exception) -> None:
    """End all requests with `error`."""
    self._fail(list(self._on_event), error)
    with self._changed:
      scorings = list(self._scorings)
      self._scorings.clear()
    for scoring in scorings:
      if scoring.result.set_running_or_notify_cancel():
        scoring.result.set_exception(error)

  def cancel(self, *requests: GenerationRequest) -> None:
    """End the requests that have not finished; they receive no further events."""
    with self._changed:
      for request in requests:
        self._on_event.pop(request, None)
      self._changed.notify()

  def _run(self) -> None:
    try:
      self._batcher.engine.compile_ahead(lambda: self._is_closing)
    except Exception as error:  # of any kind: the main thread ends the server
      self.compile_error = error
      self.fail_all(error)
      return
    if not self._is_closing:
      self.is_ready = True
      self._on_ready()
    while True:
      with self._changed:
        self._changed.wait_for(self._has_work)
        if self._is_closing:
          return
        requests = list(self._on_event)[: self._batcher.engine.num_rows]
        scoring = self._scorings.popleft() if self._scorings else None
      if scoring is not None:
        self._score(scoring)
      try:
        events = self._advance(requests)
      except Exception as error:  # of any kind: the waiting clients need an answer
        with contextlib.suppress(Exception):  # the next requests then fail and report an error too
          self._batcher.reset()
        self._fail(requests, error)
        continue
      for event in events:
        self._send(event.request, event, is_last=bool(event.finish_reason))

  def _has_work(self) -> bool:
    """Whether there are requests, or rows of requests that ended, or the thread should end."""
    return self._is_closing or self.num_active > 0 or not self._batcher.is_idle

  def _score(self, scoring: _Scoring) -> None:
    if not scoring.result.set_running_or_notify_cancel():  # its client has disconnected
      return
    try:
      scoring.result.set_result(self._batcher.engine.score(scoring.tokens, scoring.num_top))
    except Exception as error:  # of any kind: the waiting client needs an answer
      scoring.result.set_exception(error)

  def _advance(self, requests: list[GenerationRequest]) -> list[TokenEvent]:
    """Give rows to exactly these requests, and return their next tokens."""
    for request in self._batcher.active - set(requests):
      self._batcher.cancel(request)
    new = [request for request in requests if request not in self._batcher.active]
    events = self._batcher.add(new)
    if requests and not events:
      events = self._batcher.step()
    return events

  def _fail(self, requests: list[GenerationRequest], error: Exception) -> None:
    for request in requests:
      self._send(request, error, is_last=True)

  def _send(self, request: GenerationRequest, event: Event, *, is_last: bool) -> None:
    with self._changed:
      on_event = self._on_event.get(request)
      if on_event is None:  # cancelled
        return
      if is_last:
        del self._on_event[request]
    on_event(event)
