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
_HANDSHAKE_SECONDS = 10.0  # for the hello to arrive
_MIN_HANDSHAKES = 64  # open at a time, or as many as the run has processes
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

  `digest` is the hexadecimal SHA-256 of what all processes must have in common (config_check.py).
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
class _Handshake:
  """A connection whose hello has not arrived in full."""

  connection: socket.socket
  challenge: str
  deadline: float
  received: bytes = b""
  has_proof: bool = False  # that process 0 has the token


class Handshakes:
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
    self._max_handshakes = max(_MIN_HANDSHAKES, num_processes)
    self._selector = selectors.DefaultSelector()
    self._handshakes: dict[_Handshake, None] = {}  # oldest first
    self._arrived: collections.deque[tuple[Hello, socket.socket]] = collections.deque()
    listener.setblocking(False)  # a connection may have gone before it is accepted
    self._selector.register(listener, selectors.EVENT_READ, None)

  def __enter__(self) -> "Handshakes":
    return self

  def __exit__(self, *_: object) -> None:
    for handshake in list(self._handshakes):
      self._end(handshake)
    for _hello, connection in self._arrived:
      connection.close()
    self._selector.close()

  def next_hello(self, deadline: float) -> tuple[Hello, socket.socket] | None:
    """Return the next proven hello and its connection; None at the deadline (time.monotonic())."""
    while not self._arrived:
      now = time.monotonic()
      if now >= deadline:
        return None
      self._end_expired(now)
      wake = deadline
      for handshake in self._handshakes:
        wake = min(wake, handshake.deadline)
      for key, _ in self._selector.select(wake - now):
        if key.data is None:
          self._accept()
        elif key.data in self._handshakes:  # it was not ended for a newer one
          self._receive(key.data)
    return self._arrived.popleft()

  def _accept(self) -> None:
    """Accept a connection and send it a challenge; too many dismiss the oldest."""
    try:
      connection, _ = self._listener.accept()
    except OSError as error:
      if error.errno in _EXHAUSTED:
        if self._handshakes:
          self._end(next(iter(self._handshakes)))
        else:
          time.sleep(_RETRY_SECONDS)  # the listener stays readable
      return
    if len(self._handshakes) >= self._max_handshakes:
      self._end(next(iter(self._handshakes)))
    connection.settimeout(_HANDSHAKE_SECONDS)
    handshake = _Handshake(
      connection=connection,
      challenge=new_challenge(),
      deadline=time.monotonic() + _HANDSHAKE_SECONDS,
    )
    self._handshakes[handshake] = None
    self._selector.register(connection, selectors.EVENT_READ, handshake)
    with contextlib.suppress(OSError):
      connection.sendall(f"{handshake.challenge}\n".encode())

  def _receive(self, handshake: _Handshake) -> None:
    """Read what a peer has sent; once it is a line, answer, accept or end the handshake."""
    received = b""
    with contextlib.suppress(OSError):
      received = handshake.connection.recv(LINE_BYTES)
    handshake.received += received
    is_open = received and len(handshake.received) < LINE_BYTES
    if is_open and not handshake.received.endswith(b"\n"):
      return
    other_challenge = parse_challenge(handshake.received)
    if other_challenge and not handshake.has_proof:
      handshake.has_proof = True
      handshake.received = b""
      with contextlib.suppress(OSError):
        proof = proof_of_process_0(handshake.challenge, other_challenge, self._token)
        handshake.connection.sendall(proof)
      return
    line = handshake.received.decode("ascii", "replace")
    hello = Hello.verify(line, handshake.challenge, self._token)
    if hello is None:
      if _HELLO.fullmatch(line):  # of a process with another token, which need not wait
        with contextlib.suppress(OSError):
          handshake.connection.sendall(REFUSED)
      self._end(handshake)
      return
    self._forget(handshake)
    handshake.connection.settimeout(None)
    self._arrived.append((hello, handshake.connection))

  def _end_expired(self, now: float) -> None:
    for handshake in list(self._handshakes):
      if handshake.deadline <= now:
        self._end(handshake)

  def _end(self, handshake: _Handshake) -> None:
    """Close the connection of a handshake."""
    self._forget(handshake)
    handshake.connection.close()

  def _forget(self, handshake: _Handshake) -> None:
    del self._handshakes[handshake]
    self._selector.unregister(handshake.connection)
