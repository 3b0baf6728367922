"""Connections to process 0 before they have proven that they belong to the run.

Both sides prove that they have the run's token, process 0 first, so that a process tells nothing of
the run to another program at the address:

    process 0   CHALLENGE, which is random
    process     CHALLENGE of its own
    process 0   HMAC of both with the token
    process     its hello, and the HMAC of process 0's challenge and the hello

There are few unproven connections, and each is open for seconds, so that strangers exhaust neither
files nor time.
"""

import collections
import contextlib
import dataclasses
import errno
import hmac
import re
import secrets
import selectors
import socket
import time

LINE_BYTES = 4096
REFUSED = b"refused\n"  # answers a hello without the proof
_VISIT_SECONDS = 10.0  # for the hello to arrive
_MIN_VISITORS = 64  # open at a time, or as many as the run has processes
_RETRY_SECONDS = 0.1
_CHALLENGE = re.compile(r"([0-9a-f]{32})\n")
_HELLO = re.compile(r"(\d{1,9}) (\d{1,9}) ([0-9a-f]{64}) ([0-9a-f]{64})\n")
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def new_challenge() -> str:
  return secrets.token_hex(16)


def parse_challenge(line: bytes) -> str:
  """Return the challenge that a line has; empty if it is another line."""
  found = _CHALLENGE.fullmatch(line.decode("ascii", "replace"))
  return found[1] if found else ""


def proof_of_process_0(challenge: str, other_challenge: str, token: str) -> bytes:
  """Return the line by which process 0 proves the token, to a process with `other_challenge`."""
  return f"{_hmac(f'process 0: {challenge} {other_challenge}', token)}\n".encode()


def _hmac(message: str, token: str) -> str:
  return hmac.new(token.encode(), message.encode(), "sha256").hexdigest()


@dataclasses.dataclass(frozen=True)
class Hello:
  """What a process sends to process 0.

  `digest` is the hexadecimal SHA-256 of what all processes must have in common (agreement.py).
  """

  num_processes: int
  process_id: int
  digest: str

  def line(self, challenge: str, token: str) -> bytes:
    """Return the line that a process sends."""
    proof = self._proof(challenge, token)
    return f"{self._text} {proof}\n".encode()

  @property
  def _text(self) -> str:
    return f"{self.num_processes} {self.process_id} {self.digest}"

  def _proof(self, challenge: str, token: str) -> str:
    return _hmac(f"{challenge} {self._text}", token)

  @classmethod
  def verify(cls, line: str, challenge: str, token: str) -> "Hello | None":
    """Return the hello of a line with the right proof; None for other lines."""
    found = _HELLO.fullmatch(line)
    if found is None:
      return None
    hello = cls(
      num_processes=int(found[1]),
      process_id=int(found[2]),
      digest=found[3],
    )
    proof = hello._proof(challenge, token)
    if not hmac.compare_digest(found[4], proof):
      return None
    if not 0 < hello.process_id < hello.num_processes:
      return None
    return hello


@dataclasses.dataclass(eq=False)
class _Visitor:
  """A connection whose hello has not arrived in full."""

  connection: socket.socket
  challenge: str
  deadline: float
  received: bytes = b""
  has_proof: bool = False  # that process 0 has the token


class Visitors:
  """The unproven connections of `listener`, while the context is open."""

  def __init__(
    self,
    listener: socket.socket,
    token: str,
    num_processes: int,
  ) -> None:
    """Accept connections of `listener`; the caller closes it.

    Args:
      listener: listens at the address of process 0.
      token: the secret that the processes of the run share.
      num_processes: the number of all processes of the run.
    """
    self._listener = listener
    self._token = token
    self._max_visitors = max(_MIN_VISITORS, num_processes)
    self._selector = selectors.DefaultSelector()
    self._visitors: dict[_Visitor, None] = {}  # oldest first
    self._arrived: collections.deque[tuple[Hello, socket.socket]] = collections.deque()
    listener.setblocking(False)  # a connection may have gone before it is accepted
    self._selector.register(listener, selectors.EVENT_READ, None)

  def __enter__(self) -> "Visitors":
    return self

  def __exit__(self, *_: object) -> None:
    for visitor in list(self._visitors):
      self._dismiss(visitor)
    for _hello, connection in self._arrived:
      connection.close()
    self._selector.close()

  def next_hello(self, deadline: float) -> tuple[Hello, socket.socket] | None:
    """Return the next proven hello and its connection; None at the deadline (time.monotonic())."""
    while not self._arrived:
      now = time.monotonic()
      if now >= deadline:
        return None
      self._dismiss_expired(now)
      wake = deadline
      for visitor in self._visitors:
        wake = min(wake, visitor.deadline)
      for key, _ in self._selector.select(wake - now):
        if key.data is None:
          self._accept()
        elif key.data in self._visitors:  # it was not dismissed for a newer one
          self._receive(key.data)
    return self._arrived.popleft()

  def _accept(self) -> None:
    """Accept a connection and send it a challenge; too many dismiss the oldest."""
    try:
      connection, _ = self._listener.accept()
    except OSError as error:
      if error.errno in _EXHAUSTED:
        if self._visitors:
          self._dismiss(next(iter(self._visitors)))
        else:
          time.sleep(_RETRY_SECONDS)  # the listener stays readable
      return
    if len(self._visitors) >= self._max_visitors:
      self._dismiss(next(iter(self._visitors)))
    connection.settimeout(_VISIT_SECONDS)
    visitor = _Visitor(
      connection=connection,
      challenge=new_challenge(),
      deadline=time.monotonic() + _VISIT_SECONDS,
    )
    self._visitors[visitor] = None
    self._selector.register(connection, selectors.EVENT_READ, visitor)
    with contextlib.suppress(OSError):
      connection.sendall(f"{visitor.challenge}\n".encode())

  def _receive(self, visitor: _Visitor) -> None:
    """Read what a visitor has sent; once it is a line, answer, accept or dismiss the visitor."""
    received = b""
    with contextlib.suppress(OSError):
      received = visitor.connection.recv(LINE_BYTES)
    visitor.received += received
    is_open = received and len(visitor.received) < LINE_BYTES
    if is_open and not visitor.received.endswith(b"\n"):
      return
    other_challenge = parse_challenge(visitor.received)
    if other_challenge and not visitor.has_proof:
      visitor.has_proof = True
      visitor.received = b""
      with contextlib.suppress(OSError):
        proof = proof_of_process_0(visitor.challenge, other_challenge, self._token)
        visitor.connection.sendall(proof)
      return
    line = visitor.received.decode("ascii", "replace")
    hello = Hello.verify(line, visitor.challenge, self._token)
    if hello is None:
      if _HELLO.fullmatch(line):  # of a process with another token, which need not wait
        with contextlib.suppress(OSError):
          visitor.connection.sendall(REFUSED)
      self._dismiss(visitor)
      return
    self._forget(visitor)
    visitor.connection.settimeout(None)
    self._arrived.append((hello, visitor.connection))

  def _dismiss_expired(self, now: float) -> None:
    for visitor in list(self._visitors):
      if visitor.deadline <= now:
        self._dismiss(visitor)

  def _dismiss(self, visitor: _Visitor) -> None:
    """Close the connection of a visitor."""
    self._forget(visitor)
    visitor.connection.close()

  def _forget(self, visitor: _Visitor) -> None:
    del self._visitors[visitor]
    self._selector.unregister(visitor.connection)
