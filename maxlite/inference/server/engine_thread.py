"""The thread that generates: requests come from other threads, and tokens go back to them."""

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator

from maxlite.inference.batcher import Batcher, Event
from maxlite.inference.engine import Request

OnEvent = Callable[[Event | Exception], None]  # called in the worker's thread


class FullError(Exception):
  """As many requests wait as may."""


class Worker:
  """A batcher in a thread of its own, behind a queue of at most `queue_size` requests.

  What goes wrong in a step is given to all requests under way, and the worker goes on.
  """

  def __init__(self, batcher: Batcher, queue_size: int) -> None:
    self._batcher, self._most = batcher, batcher.engine.num_rows + queue_size
    self._changed = threading.Condition()
    # Under the condition's lock:
    self._waiting: collections.deque[Request] = collections.deque()
    self._cancelled: list[Request] = []
    self._on_event: dict[Request, OnEvent] = {}  # of all that are accepted and not done
    self._is_closing = False

  @contextlib.contextmanager
  def running(self) -> Iterator["Worker"]:
    """Generates inside the block."""
    thread = threading.Thread(target=self._work, name="generation", daemon=True)
    thread.start()
    try:
      yield self
    finally:
      with self._changed:
        self._is_closing = True
        self._changed.notify()
      thread.join()

  def submit(self, on_event: dict[Request, OnEvent]) -> None:
    """Accepts all of these requests, or none.

    Raises:
      UserError: a request that no row can hold.
      FullError: more would wait than may.
    """
    for request in on_event:
      self._batcher.engine.check(request)
    with self._changed:
      if len(self._on_event) + len(on_event) > self._most:
        raise FullError
      self._on_event |= on_event
      self._waiting.extend(on_event)
      self._changed.notify()

  @property
  def num_accepted(self) -> int:
    """Requests that wait or are under way."""
    return len(self._on_event)

  def cancel(self, request: Request) -> None:
    """Ends a request, if it has not ended; no event of it comes any more."""
    with self._changed:
      if self._on_event.pop(request, None):
        self._cancelled.append(request)
        self._changed.notify()

  def _work(self) -> None:
    while self._wait():
      try:
        for request in self._taken_cancelled():
          self._batcher.drop(request)
        events = self._batcher.add(self._taken_waiting(self._batcher.num_free))
        if not events and not self._batcher.is_idle:
          events = self._batcher.step()
      except Exception as error:  # whatever it is, those who wait must be told
        self._fail(error)
        events = []
      for event in events:
        self._tell(event)

  def _wait(self) -> bool:
    """True as soon as there is anything to do; False: the end."""
    with self._changed:
      idle = lambda: self._batcher.is_idle and not self._waiting and not self._cancelled
      self._changed.wait_for(lambda: self._is_closing or not idle())
      return not self._is_closing

  def _taken_cancelled(self) -> list[Request]:
    with self._changed:
      taken, self._cancelled = self._cancelled, []
      self._waiting = collections.deque(r for r in self._waiting if r in self._on_event)
      return taken

  def _taken_waiting(self, most: int) -> list[Request]:
    with self._changed:
      return [self._waiting.popleft() for _ in range(min(most, len(self._waiting)))]

  def _tell(self, event: Event) -> None:
    with self._changed:
      take = self._on_event.pop if event.reason else self._on_event.get
      on_event = take(event.request, None)
    if on_event:
      on_event(event)

  def _fail(self, error: Exception) -> None:
    with self._changed:
      failed = [(r, e) for r, e in self._on_event.items() if r not in self._waiting]
      for request, _ in failed:
        del self._on_event[request]
    with contextlib.suppress(Exception):  # then the next requests fail, too, and are told
      self._batcher.clear()
    for _, on_event in failed:
      on_event(error)
