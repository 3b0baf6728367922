"""An end to a step that hangs."""

import faulthandler
import sys
import threading
import time
from types import TracebackType

from maxlite.distributed.heartbeat import exit_process

_NET_SECONDS = 10.0


class Watchdog:
  """A context: while it is open, what was expected must come in time, or this process ends.

  The stacks of all threads are written first.
  """

  def __init__(self, seconds: float):
    """0 seconds: nothing ever takes too long."""
    self._seconds = seconds
    self._what, self._deadline = "", float("inf")
    self._closed = threading.Event()

  def expect(self, what: str) -> None:
    """From now on `what` has the seconds that there are."""
    self._what, self._deadline = what, time.monotonic() + self._seconds
    if self._seconds:  # a net for when the interpreter itself is held, and no thread of it can run
      faulthandler.dump_traceback_later(self._seconds + _NET_SECONDS, exit=True)

  def __enter__(self) -> "Watchdog":
    if self._seconds:
      threading.Thread(target=self._run, name="watchdog", daemon=True).start()
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    self._closed.set()
    if self._seconds:
      faulthandler.cancel_dump_traceback_later()

  def _run(self) -> None:
    while not self._closed.wait(min(self._deadline - time.monotonic(), self._seconds)):
      if time.monotonic() >= self._deadline:
        sys.stderr.write(
          f"{self._what} took longer than {self._seconds:g} s (step_timeout_seconds); threads:\n"
        )
        faulthandler.dump_traceback(all_threads=True)
        exit_process(1)
