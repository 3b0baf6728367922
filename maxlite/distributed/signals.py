"""A request to stop, from Ctrl-C or a scheduler, that lets the step in progress finish."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
  """Whether, and by which signal, the run was asked to stop."""

  def __init__(self) -> None:
    self._received: signal.Signals | None = None

  def after(self, step: int) -> signal.Signals | None:
    """The signal to stop for after `step`; to be asked after every step."""
    return self._received

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    del frame
    self._received = signal.Signals(number)
    for each in SIGNALS:  # a second one ends the process at once
      signal.signal(each, signal.SIG_DFL)


class SharedStopRequest(StopRequest):
  """A request to any of many processes, which all of them take after the same step.

  JAX watches for SIGTERM and agrees on a step that none of the processes has taken yet.
  """

  def after(self, step: int) -> signal.Signals | None:
    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else None

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
  """While open, SIGTERM and SIGINT (Ctrl-C) are noted instead of ending the process."""
  shared = jax.process_count() > 1
  request = SharedStopRequest() if shared else StopRequest()
  handled = (signal.SIGINT,) if shared else SIGNALS  # the other one is JAX's
  before = {each: signal.signal(each, request._on_signal) for each in handled}
  try:
    yield request
  finally:
    for each, handler in before.items():
      signal.signal(each, handler)
