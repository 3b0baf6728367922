"""A timeout for steps that hang."""

import faulthandler
import math
import threading
import time

from maxlite.config.errors import write_line
from maxlite.distributed.heartbeat import exit_process

_FALLBACK_SECONDS = 10.0


class Watchdog:
  """While the context is open, an operation that exceeds its timeout ends this process.

  The stacks of all threads are printed first.
  """

  def __init__(self, seconds: float) -> None:
    """Set the timeout of each operation; 0 seconds: none."""
    self._seconds = seconds
    self._operation = ""
    self._deadline = math.inf
    self._closed = threading.Event()

  def expect(self, operation: str) -> None:
    """Start the timeout of the next operation."""
    self._operation = operation
    self._deadline = time.monotonic() + self._seconds
    if self._seconds:  # a fallback if the GIL is held and no Python thread can run
      faulthandler.dump_traceback_later(self._seconds + _FALLBACK_SECONDS, exit=True)

  def __enter__(self) -> "Watchdog":
    if self._seconds:
      threading.Thread(target=self._run, name="watchdog", daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._closed.set()
    if self._seconds:
      faulthandler.cancel_dump_traceback_later()

  def _run(self) -> None:
    """Wait until the context is closed, or end the process at the deadline."""
    while not self._closed.wait(min(self._deadline - time.monotonic(), self._seconds)):
      if time.monotonic() >= self._deadline:
        write_line(
          f"{self._operation} took longer than {self._seconds:g} s (step_timeout_seconds); threads:"
        )
        faulthandler.dump_traceback(all_threads=True)
        exit_process(1)
