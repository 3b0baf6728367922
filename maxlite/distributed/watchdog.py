"""A timeout for steps that hang."""

import faulthandler
import math
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from maxlite.distributed.heartbeat import describe_late_peers, exit_with_peers, report_step
from maxlite.errors import write_line

_FALLBACK_SECONDS = 10.0
# The automatic timeout of a step.
_MIN_SECONDS = 1800.0
_TIMES_LONGEST = 20
# Files of JAX 0.10 to 0.12 whose functions are on the stack of a thread that traces, lowers or
# compiles. Under other names, compilation counts against the timeout.
_COMPILER_FILES = (
  "jax/_src/compiler.py",
  "jax/_src/interpreters/mlir.py",
  "jax/_src/interpreters/partial_eval.py",
)


class Watchdog:
  """While the context is open, an operation that exceeds its timeout ends this process.

  The stacks of all threads are printed first, and the processes that are behind. Compilation does
  not count.
  """

  def __init__(self, seconds: float) -> None:
    """Set the timeout of each operation.

    Args:
      seconds: 0: none; -1: for steps only, by the longest step so far.
    """
    self._seconds = seconds
    self._operation = ""
    self._limit = math.inf  # of the present operation
    self._deadline = math.inf
    self._longest = 0.0  # duration of a step; 0 if not known
    self._step_began: float | None = None  # when the present operation began, if it is a step
    self._num_steps = 0
    self._changed = threading.Event()
    self._is_closed = False

  def expect_step(self, step: int) -> None:
    """Start the timeout of the next step."""
    report_step(step)
    self._expect(f"step {step}", is_step=True)

  def expect(self, operation: str) -> None:
    """Start the timeout of the next operation, which is not a step."""
    self._expect(operation, is_step=False)

  def _expect(self, operation: str, *, is_step: bool) -> None:
    now = time.monotonic()
    if self._step_began is not None:
      self._num_steps += 1
      if self._num_steps > 1:  # the first includes compilation
        self._longest = max(self._longest, now - self._step_began)
    self._operation = operation
    self._step_began = now if is_step else None
    self._limit = self._limit_of(is_step=is_step)
    self._start()

  def _limit_of(self, *, is_step: bool) -> float:
    if self._seconds > 0:
      return self._seconds
    if self._seconds < 0 and is_step and self._longest:
      return max(_MIN_SECONDS, _TIMES_LONGEST * self._longest)
    return math.inf

  def _start(self) -> None:
    """Start the timeout of the present operation."""
    self._deadline = time.monotonic() + self._limit
    if self._limit < math.inf:  # a fallback if the GIL is held and no Python thread can run
      seconds = self._limit + _FALLBACK_SECONDS
      faulthandler.dump_traceback_later(seconds, exit=True, file=_stderr_descriptor())
    else:
      faulthandler.cancel_dump_traceback_later()
    self._changed.set()

  def __enter__(self) -> "Watchdog":
    if self._seconds:
      threading.Thread(target=self._run, name="watchdog", daemon=True).start()
    return self

  def __exit__(self, *_: object) -> None:
    self._is_closed = True
    self._changed.set()
    if self._seconds:
      faulthandler.cancel_dump_traceback_later()

  def _run(self) -> None:
    """Wait until the context is closed, or end the process at the deadline."""
    while not self._is_closed:
      self._changed.clear()
      left = self._deadline - time.monotonic()
      if left > 0:
        self._changed.wait(min(left, threading.TIMEOUT_MAX))
      elif _is_compiling():
        self._start()
      else:
        self._end()

  def _end(self) -> None:
    """Print what hangs, and end this process and its peers."""
    reason = f"{self._operation} took longer than {self._limit:.4g} s (step_timeout_seconds)"
    late = describe_late_peers()
    lines = "; ".join([reason, *late, "threads:"])
    write_line(lines)
    faulthandler.dump_traceback(file=_stderr_descriptor(), all_threads=True)
    exit_with_peers(reason, 1)


def _stderr_descriptor() -> int:
  """The file descriptor of stderr, also where a notebook has put an object without one there."""
  try:
    return sys.stderr.fileno()
  except (AttributeError, OSError, ValueError):  # io.UnsupportedOperation is both
    return 2


def _is_compiling() -> bool:
  """Whether a thread of this process traces, lowers or compiles a program."""
  for frame in sys._current_frames().values():
    for file in _files_of(frame):
      if file.endswith(_COMPILER_FILES):
        return True
  return False


def _files_of(frame: FrameType | None) -> Iterator[str]:
  """The files of the functions on a stack, innermost first."""
  while frame is not None:
    yield frame.f_code.co_filename
    frame = frame.f_back
