"""Stop requests by Ctrl-C or a scheduler, which let the step in progress finish."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax
from jax.experimental import multihost_utils


class StopRequest:
  """The signal, if any, that requested the run to stop.

  Of multiple processes, all stop after the same step if any has received one: JAX handles SIGTERM
  and agrees on a step that no process has finished yet.
  """

  def __init__(self, is_shared: bool) -> None:
    """Choose the signals to handle; `is_shared`: the run has several processes."""
    self._is_shared = is_shared
    self.handled = [signal.SIGINT]
    if not is_shared:
      self.handled.append(signal.SIGTERM)
    self._received: signal.Signals | None = None

  def after(self, step: int) -> signal.Signals | None:
    """Return the signal to stop for after `step`; call it after every step."""
    if self._is_shared and multihost_utils.reached_preemption_sync_point(step):
      return signal.SIGTERM
    return self._received

  def after_last(self) -> signal.Signals | None:
    """Return the signal that this process received after the last call of `after`."""
    return self._received

  def handle(self, number: int, _: FrameType | None) -> None:
    """Record a signal; the handler of `signal.signal`."""
    for each in self.handled:
      signal.signal(each, signal.SIG_DFL)  # a second one ends the process at once
    if self._is_shared:
      signal.raise_signal(signal.SIGTERM)
    else:
      self._received = signal.Signals(number)


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
  """While open, SIGTERM and SIGINT (Ctrl-C) are recorded instead of ending the process.

  Python has them handled by the main thread; in another thread, they are left as they are.
  """
  request = StopRequest(is_shared=jax.process_count() > 1)
  if threading.current_thread() is not threading.main_thread():
    yield request
    return
  previous = {each: signal.signal(each, request.handle) for each in request.handled}
  try:
    yield request
  finally:
    for each, handler in previous.items():
      signal.signal(each, handler)
