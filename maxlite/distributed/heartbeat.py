"""Failure detection: if a process dies, hangs or fails, all others exit and name it.

The connections of the rendezvous stay open, as a star around process 0. The connection of a dead
process closes, which its peer sees at once; a hung process stops sending heartbeats; a failed one
sends the reason. JAX alone would block the others in a collective and end them with a stack trace.
"""

import contextlib
import json
import multiprocessing
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import NoReturn

from maxlite.errors import write_line
from maxlite.storage.json_values import Json

EXIT_PEER_LOST = os.EX_TEMPFAIL  # exit code of a process whose peer was lost
# Messages; all but the first are prefixes.
_BYE = "bye"
_ALIVE = "alive "
_FAILED = "failed "
_VALUE = "value "
_MAX_REASON = 500  # characters
_GRACE_SECONDS = 3.0  # for a message that explains why a collective failed


class Heartbeat:
  """While the context is open, this process exits as soon as one of its peers is lost.

  An exception that leaves the context ends this process, and all others with its reason.
  """

  def __init__(
    self,
    process_id: int,
    peers: Mapping[int, socket.socket],
    timeout: float,
  ) -> None:
    """Take over the connections.

    Args:
      process_id: that of this process.
      peers: the result of `rendezvous`.
      timeout: a peer that is silent for longer is lost, in seconds.
    """
    self.step: int | None = None  # the latest that this process has begun
    self._process_id = process_id
    self._host = socket.gethostname()
    self._timeout = timeout
    self._interval = timeout / 5
    self._peers = dict(peers)
    self._values: dict[int, queue.SimpleQueue[Json]] = {}  # received JSON values, by peer
    for peer in peers:
      self._values[peer] = queue.SimpleQueue()
    self._unread = dict.fromkeys(peers, b"")
    self._last_seen = dict.fromkeys(peers, time.monotonic())
    self._positions: dict[int, Json] = {}  # [host, step] of each peer, as of its latest heartbeat
    self._selector = selectors.DefaultSelector()
    for peer, connection in peers.items():
      self._selector.register(connection, selectors.EVENT_READ, peer)
      # Without delay: a message that waits for an acknowledgement is lost when this process exits.
      connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    self._exiting = threading.Lock()  # held by the thread that ends this process
    self._is_closed = False
    self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

  def __enter__(self) -> "Heartbeat":
    _OPEN.append(self)
    self._thread.start()
    return self

  def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
    _OPEN.remove(self)
    if error is not None:
      self._fail(error)
    self._is_closed = True
    self._broadcast(_BYE)

  def all_gather(self, value: Json) -> list[Json]:
    """Return the JSON values of all processes, in order of process id, once all have called it."""
    if self._process_id > 0:
      self._broadcast(_VALUE + json.dumps(value))
      return self._values[0].get()
    values = [value]
    for peer in sorted(self._values):
      values.append(self._values[peer].get())
    self._broadcast(_VALUE + json.dumps(values))
    return values

  def _fail(self, error: BaseException) -> None:
    """End this process because of `error`, and send the reason to all others."""
    if isinstance(error, SystemExit):
      code = _exit_code(error)
      reason = str(error.__context__ or "")  # the line that exit_on_user_error has printed
    else:
      time.sleep(_GRACE_SECONDS)  # if a lost peer is the cause, the heartbeat thread exits here
      traceback.print_exception(error)
      code = 1
      if isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
      reason = f"{type(error).__name__}: {error}"
    if code:
      one_line = " ".join(reason.split())
      shown = one_line[:_MAX_REASON]
      self._exit(f"process {self._process_id} failed: {shown}", code, show=False)

  def late_peers(self) -> list[str]:
    """Describe the peers that are behind this process, as far as it has heard."""
    late = []
    for peer, (_, step) in sorted(self._positions.items()):
      is_behind = self.step is not None and (step is None or step < self.step)
      if is_behind and peer in self._peers:
        late.append(self._describe(peer))
    return late

  def _describe(self, peer: int) -> str:
    """When a peer was heard last, on which host and at which step."""
    host, step = self._positions.get(peer, ("", None))
    text = f"process {peer}"
    if host:
      text += f" on {host}"
    text += f" was last heard {time.monotonic() - self._last_seen[peer]:.0f} s ago"
    if step is not None:
      text += f", at step {step}"
    return text

  def exit_for(self, reason: str, code: int) -> NoReturn:
    """End this process for a reason that it has printed, and send the reason to all others."""
    self._exit(f"process {self._process_id} on {self._host}: {reason}", code, show=False)

  def _exit(self, reason: str, code: int, *, show: bool = True) -> NoReturn:
    """Send the reason to all others, print it if `show`, and end this process."""
    self._exiting.acquire()  # never released
    self._broadcast(_FAILED + reason)
    if show:
      write_line(f"process {self._process_id} exits: {reason}")
    exit_process(code)

  def _run(self) -> None:
    """Send and receive heartbeats until the context is closed."""
    due = time.monotonic()
    while self._peers and not self._is_closed:
      for key, _ in self._selector.select(max(due - time.monotonic(), 0)):
        if not self._is_closed:
          self._receive(key.data)
      now = time.monotonic()
      if now < due:
        continue
      if now - due > self._interval:  # this process itself was stopped
        self._last_seen = dict.fromkeys(self._last_seen, now)
      due = now + self._interval
      self._broadcast(_ALIVE + json.dumps([self._host, self.step]))
      for peer in self._peers:
        silent_seconds = now - self._last_seen[peer]
        if silent_seconds > self._timeout:
          self._exit(
            f"{self._describe(peer)}; the limit is {self._timeout:g} s "
            "(jax_distributed_heartbeat_timeout_seconds)",
            EXIT_PEER_LOST,
          )

  def _receive(self, peer: int) -> None:
    """Read what a peer has sent, which may end within a message."""
    try:
      text = self._peers[peer].recv(4096)
    except OSError:
      text = b""
    self._last_seen[peer] = time.monotonic()
    lines = (self._unread[peer] + text).split(b"\n")
    self._unread[peer] = lines.pop()
    for line in lines:
      message = line.decode(errors="replace")
      if message == _BYE:
        self._selector.unregister(self._peers.pop(peer))
        return
      if message.startswith(_ALIVE):
        self._positions[peer] = json.loads(message.removeprefix(_ALIVE))
      if message.startswith(_VALUE):
        self._values[peer].put(json.loads(message.removeprefix(_VALUE)))
      if message.startswith(_FAILED):
        self._exit(message.removeprefix(_FAILED), EXIT_PEER_LOST)
    if not text:
      self._exit(f"process {peer} died", EXIT_PEER_LOST)

  def _broadcast(self, message: str) -> None:
    """Send a message to all peers that can still be reached."""
    line = f"{message}\n".encode()
    for connection in list(self._peers.values()):
      with contextlib.suppress(OSError):
        connection.sendall(line)


_OPEN: list[Heartbeat] = []  # that of this process, if it has peers


def report_step(step: int) -> None:
  """Tell the peers, if there are any, that this process has begun a step."""
  for heartbeat in _OPEN:
    heartbeat.step = step


def describe_late_peers() -> list[str]:
  """Describe the peers that are behind this process, one text each."""
  late = []
  for heartbeat in _OPEN:
    late += heartbeat.late_peers()
  return late


def exit_with_peers(reason: str, code: int) -> NoReturn:
  """End this process, and all its peers with the reason."""
  for heartbeat in _OPEN:
    heartbeat.exit_for(reason, code)
  exit_process(code)


def _exit_code(error: SystemExit) -> int:
  """Return the exit code of a process that ends by `error`."""
  if isinstance(error.code, int):
    return error.code
  if error.code is None:
    return 0
  return 1


def exit_process(code: int) -> NoReturn:
  """End this process and its children without the exit handlers, which would wait for peers."""
  for child in multiprocessing.active_children():
    child.kill()
  for stream in (sys.stdout, sys.stderr):
    with contextlib.suppress(OSError, ValueError):
      stream.flush()
  os._exit(code)
