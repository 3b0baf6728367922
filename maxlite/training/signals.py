"""A request to stop, from Ctrl-C or a scheduler, that lets the step in progress finish."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
  """Whether, and by which signal, the run was asked to stop."""

  def __init__(self) -> None:
    self.received: signal.Signals | None = None

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    del frame
    self.received = signal.Signals(number)
    for each in SIGNALS:  # a second one ends the process at once
      signal.signal(each, signal.SIG_DFL)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
  """While open, SIGTERM and SIGINT (Ctrl-C) are noted instead of ending the process."""
  request = StopRequest()
  before = {each: signal.signal(each, request._on_signal) for each in SIGNALS}
  try:
    yield request
  finally:
    for each, handler in before.items():
      signal.signal(each, handler)
