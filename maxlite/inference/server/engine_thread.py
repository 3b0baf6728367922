"""The thread that runs the engine: it takes requests from other threads and returns tokens."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator

from maxlite.inference.batcher import Batcher, TokenEvent
from maxlite.inference.engine import GenerationRequest

OnEvent = Callable[[TokenEvent | Exception], None]  # called in the engine's thread


class QueueFullError(Exception):
  """The queue of waiting requests is full."""


class EngineThread:
  """Runs a batcher in its own thread, behind a queue of at most `queue_size` requests.

  An error in a step is passed to all requests in progress, and the thread continues.
  """

  def __init__(self, batcher: Batcher, queue_size: int) -> None:
    self._batcher, self._max_active = batcher, batcher.engine.num_rows + queue_size
    self._changed = threading.Condition()
    # Guarded by the condition:
    self._waiting: collections.deque[GenerationRequest] = collections.deque()
    self._cancelled: list[GenerationRequest] = []
    self._on_event: dict[GenerationRequest, OnEvent] = {}  # of accepted, unfinished requests
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

  def submit(self, on_event: dict[GenerationRequest, OnEvent]) -> None:
    """Accept all of these requests, or none.

    Raises:
      UserError: no row can hold a request.
      QueueFullError: the queue has no room for them.
    """
    for request in on_event:
      self._batcher.engine.check(request)
    with self._changed:
      if len(self._on_event) + len(on_event) > self._max_active:
        raise QueueFullError
      self._on_event |= on_event
      self._waiting.extend(on_event)
      self._changed.notify()

  @property
  def num_active(self) -> int:
    """Number of requests waiting or in progress."""
    return len(self._on_event)

  def cancel(self, request: GenerationRequest) -> None:
    """End a request if it has not finished; it receives no further events."""
    with self._changed:
      if self._on_event.pop(request, None):
        self._cancelled.append(request)
        self._changed.notify()

  def _run(self) -> None:
    while self._wait():
      try:
        for request in self._take_cancelled():
          self._batcher.cancel(request)
        events = self._batcher.add(self._take_waiting(self._batcher.num_free))
        if not events and not self._batcher.is_idle:
          events = self._batcher.step()
      except Exception as error:  # of any kind: the waiting clients need an answer
        self._fail(error)
        events = []
      for event in events:
        self._send(event)

  def _wait(self) -> bool:
    """Wait for work; return False if the thread must end."""
    with self._changed:
      has_work = lambda: self._waiting or self._cancelled or not self._batcher.is_idle
      self._changed.wait_for(lambda: self._is_closing or has_work())
      return not self._is_closing

  def _take_cancelled(self) -> list[GenerationRequest]:
    with self._changed:
      taken, self._cancelled = self._cancelled, []
      self._waiting = collections.deque(r for r in self._waiting if r in self._on_event)
      return taken

  def _take_waiting(self, limit: int) -> list[GenerationRequest]:
    with self._changed:
      return [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]

  def _send(self, event: TokenEvent) -> None:
    with self._changed:
      take = self._on_event.pop if event.finish_reason else self._on_event.get
      on_event = take(event.request, None)
    if on_event:
      on_event(event)

  def _fail(self, error: Exception) -> None:
    with self._changed:
      failed = [(r, e) for r, e in self._on_event.items() if r not in self._waiting]
      for request, _ in failed:
        del self._on_event[request]
    with contextlib.suppress(Exception):  # the next requests then fail and report an error too
      self._batcher.reset()
    for _, on_event in failed:
      on_event(error)
