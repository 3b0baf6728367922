"""No process of a run waits for one that is gone: whoever is lost is told to all, and all leave.

The connections of the meeting stay open, as a star around process 0. A process that dies closes its
own, which the other end hears at once; one that hangs is not heard any more; one that fails says
why. JAX would let the others wait in a collective, and end them with a trace.
"""

import contextlib
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn

EXIT_PEER_LOST = os.EX_TEMPFAIL  # exit code of a process that left because another was lost
_BYE, _ALIVE, _GONE = "bye", "alive", "gone "
_GRACE_SECONDS = 3.0  # for the news why a collective failed


class Heartbeat:
  """A context: while it is open, this process ends as soon as one of its peers is lost.

  An exception that leaves the context ends this process, and with its reason all others.
  """

  def __init__(self, process_id: int, peers: Mapping[int, socket.socket], timeout: float):
    """`peers` are the connections of `rendezvous`; who is silent for `timeout` seconds is lost."""
    self._me, self._timeout, self._interval = process_id, timeout, timeout / 5
    self._peers = dict(peers)
    self._unread = dict.fromkeys(peers, b"")
    self._heard = dict.fromkeys(peers, time.monotonic())
    self._selector = selectors.DefaultSelector()
    for peer, connection in peers.items():
      self._selector.register(connection, selectors.EVENT_READ, peer)
    self._lock = threading.Lock()  # held by whoever ends this process
    self._is_over = False
    self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

  def __enter__(self) -> "Heartbeat":
    self._thread.start()
    return self

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
  ) -> None:
    if error is not None:
      self._fail(error)
    self._is_over = True
    self._tell(_BYE)

  def _fail(self, error: BaseException) -> None:
    """Ends this process for `error`, which all others are told."""
    if isinstance(error, SystemExit):
      code = error.code if isinstance(error.code, int) else int(error.code is not None)
      reason = str(error.__context__ or "")  # what exit_on_user_error has written
    else:
      time.sleep(_GRACE_SECONDS)  # were it another's loss, the watch would end this process here
      traceback.print_exception(error)
      interrupted = isinstance(error, KeyboardInterrupt)
      code = 128 + signal.SIGINT if interrupted else 1
      reason = f"{type(error).__name__}: {error}"
    if code:
      self._end(f"process {self._me} failed: {' '.join(reason.split())[:500]}", code, show=False)

  def _end(self, reason: str, code: int, *, show: bool = True) -> None:
    self._lock.acquire()  # for good
    self._tell(_GONE + reason)
    if show:
      sys.stderr.write(f"process {self._me} leaves: {reason}\n")
    exit_process(code)

  def _run(self) -> None:
    due = time.monotonic()
    while self._peers and not self._is_over:
      for key, _ in self._selector.select(max(due - time.monotonic(), 0)):
        if not self._is_over:
          self._hear(key.data)
      now = time.monotonic()
      if now < due:
        continue
      if now - due > self._interval:  # it was this process that was stopped
        self._heard = dict.fromkeys(self._heard, now)
      due = now + self._interval
      self._tell(_ALIVE)
      for peer in self._peers:
        if now - self._heard[peer] > self._timeout:
          self._end(
            f"process {peer} was silent for {self._timeout:g} s "
            "(jax_distributed_heartbeat_timeout_seconds)",
            EXIT_PEER_LOST,
          )

  def _hear(self, peer: int) -> None:
    try:
      text = self._peers[peer].recv(4096)
    except OSError:
      text = b""
    self._heard[peer] = time.monotonic()
    *messages, self._unread[peer] = (self._unread[peer] + text).split(b"\n")
    for message in map(bytes.decode, messages):
      if message == _BYE:
        self._selector.unregister(self._peers.pop(peer))
        return
      if message.startswith(_GONE):
        self._end(message.removeprefix(_GONE), EXIT_PEER_LOST)
    if not text:
      self._end(f"process {peer} died", EXIT_PEER_LOST)

  def _tell(self, message: str) -> None:
    for connection in list(self._peers.values()):
      with contextlib.suppress(OSError):
        connection.sendall(message.encode() + b"\n")


def exit_process(code: int) -> NoReturn:
  """Ends this process and those it started; the usual way out would wait for its peers."""
  for child in multiprocessing.active_children():
    child.kill()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(code)
