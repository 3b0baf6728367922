"""Stop requests by Ctrl-C or a scheduler, which let the step in progress finish."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
  """The signal, if any, that requested the run to stop."""

  def __init__(self) -> None:
    self._received: signal.Signals | None = None

  def after(self, step: int) -> signal.Signals | None:
    """The signal to stop for after `step`; call it after every step."""
    return self._received

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    del frame
    self._received = signal.Signals(number)
    for each in SIGNALS:  # a second one ends the process at once
      signal.signal(each, signal.SIG_DFL)


class SharedStopRequest(StopRequest):
  """A request to any of multiple processes, on which all of them stop after the same step.

  JAX handles SIGTERM and agrees on a step that no process has finished yet.
  """

  def after(self, step: int) -> signal.Signals | None:
    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
  """While open, SIGTERM and SIGINT (Ctrl-C) are recorded instead of ending the process."""
  shared = jax.process_count() > 1
  request = SharedStopRequest() if shared else StopRequest()
  handled = (signal.SIGINT,) if shared else SIGNALS  # JAX handles SIGTERM if shared
  previous = {each: signal.signal(each, request._on_signal) for each in handled}
  try:
    yield request
  finally:
    for each, handler in previous.items():
      signal.signal(each, handler)
