"""Reports of long waits: what a process is doing, and for how long."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from maxlite.errors import write_line

Report = Callable[[str], object]  # receives a line
FIRST_SECONDS = 5.0


def print_to_stderr(line: str) -> None:
  """Print a line at once."""
  write_line(line)


@contextlib.contextmanager
def report_wait(activity: str, report: Report = print_to_stderr) -> Iterator[None]:
  """While open, report `activity` with its elapsed time after 5 s, 10 s, 20 s and so on."""
  since = time.perf_counter()
  with report_activities(lambda: (activity, time.perf_counter() - since), report):
    yield


@contextlib.contextmanager
def report_activities(current: Callable[[], tuple[str, float]], report: Report) -> Iterator[None]:
  """While open, report the current activity after FIRST_SECONDS, twice as many, and so on.

  Args:
    current: returns (activity, its elapsed seconds); an empty activity is not reported.
  """
  closed = threading.Event()
  seconds = FIRST_SECONDS

  def watch() -> None:
    before = 0.0
    due = seconds
    while not closed.wait(seconds / 5):
      activity, elapsed = current()
      if elapsed < before:  # another activity has begun
        due = seconds
      if activity and elapsed >= due:
        report(f"{activity} ... {elapsed:.0f} s")
        due *= 2
      before = elapsed

  thread = threading.Thread(target=watch, name="waits", daemon=True)
  thread.start()
  try:
    yield
  finally:
    closed.set()
    thread.join()
