"""The thread that runs the engine: it takes requests from other threads and returns tokens."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from maxlite.errors import UserError
from maxlite.inference.batcher import Batcher, TokenEvent
from maxlite.inference.engine import Engine, GenerationRequest

T = TypeVar("T")
Event = TokenEvent | Exception
OnEvent = Callable[[Event], None]  # called in the engine's thread


class _Call(NamedTuple):
  """A function of the engine, and the future result."""

  function: Callable[[Engine], Any]
  result: Future


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
    self.has_experts = batcher.engine.has_experts
    self.max_active = self.num_rows + queue_size
    self.is_ready = False
    self.compile_error: Exception | None = None  # without programs, no request can be answered
    self._changed = threading.Condition()
    # Guarded by the condition: unfinished requests in order of arrival. The first have rows.
    self._on_event: dict[GenerationRequest, OnEvent] = {}
    self._calls: collections.deque[_Call] = collections.deque()
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
    return len(self._on_event) + len(self._calls)

  def call(self, function: Callable[[Engine], T]) -> Future[T]:
    """Call a function of the engine, such as `Engine.score`, between two steps of requests."""
    result: Future[T] = Future()
    with self._changed:
      self._calls.append(_Call(function, result))
      self._changed.notify()
    return result

  def fail_all(self, error: Exception) -> None:
    """End all requests with `error`."""
    self._fail(list(self._on_event), error)
    with self._changed:
      calls = list(self._calls)
      self._calls.clear()
    for call in calls:
      if call.result.set_running_or_notify_cancel():
        call.result.set_exception(error)

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
        call = self._calls.popleft() if self._calls else None
      if call is not None:
        self._call(call)
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

  def _call(self, call: _Call) -> None:
    if not call.result.set_running_or_notify_cancel():  # its client has disconnected
      return
    try:
      call.result.set_result(call.function(self._batcher.engine))
    except Exception as error:  # of any kind: the waiting client needs an answer
      call.result.set_exception(error)

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
