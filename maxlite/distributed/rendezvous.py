"""Rendezvous of all processes of a run at process 0: all are present and agree, or all fail.

Process 0 and another process prove to each other that they belong to the run, and the other one
sends its hello (handshake.py). Process 0 answers that it has joined, or first requests what both
must have in common (config_check.py) if it differs. At the end, process 0 sends the outcome: a line
with an error, or an empty line.
"""

import contextlib
import dataclasses
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import Collection, Mapping

from maxlite.distributed.config_check import describe_difference, digest, parse_fingerprint
from maxlite.distributed.handshake import (
  LINE_BYTES,
  REFUSED,
  Handshakes,
  Hello,
  new_challenge,
  parse_challenge,
  proof_of_process_0,
)
from maxlite.errors import UserError

TOKEN = "MAXLITE_COORDINATOR_TOKEN"  # environment variable: a secret that a run's processes share
# Answers to a hello.
_JOINED = b"joined\n"
_DESCRIBE = b"describe\n"
_FACTS_BYTES = 1 << 20
_ANSWER_SECONDS = 10.0  # for an answer to a challenge, a hello or a request
_CONNECT_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_MAX_SHOWN = 8  # missing processes in a message
_BACKLOG = 128  # connections that wait to be accepted
_ERROR_SECONDS = 5.0  # after an error, for the other processes to connect and receive it


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
  """The address of process 0 (HOST:PORT), the number of processes, and the id of this one."""

  address: str
  num_processes: int
  process_id: int

  @property
  def endpoint(self) -> tuple[str, int]:
    """Host and port of process 0."""
    host, _, port = self.address.rpartition(":")
    return host.strip("[]"), int(port)


def rendezvous(
  spec: ProcessSpec,
  timeout: float,
  token: str = "",
  fingerprint: Mapping[str, str] | None = None,
) -> dict[int, socket.socket]:
  """Connect process 0 to all others, and any other process to process 0.

  The port is free again afterwards, for JAX's coordinator.

  Args:
    spec: this process.
    timeout: for all processes to connect, in seconds.
    token: the secret that the processes of the run share.
    fingerprint: {name: value} of what all processes must have in common; None: nothing.

  Returns:
    {process id: connection}, on process 0 of all others, on another process of process 0.

  Raises:
    UserError: on all processes, if one is missing after `timeout` seconds, two have the same id, or
      they disagree on the number of processes or on the fingerprint.
  """
  deadline = time.monotonic() + timeout
  own_fingerprint = fingerprint or {}
  if spec.process_id > 0:
    return {0: _join(spec, own_fingerprint, deadline, timeout, token)}
  joined: list[socket.socket] = []
  peers: dict[int, socket.socket] = {}
  error = ""
  with _listen(spec) as listener, Handshakes(listener, token, spec.num_processes) as handshakes:
    while len(joined) < spec.num_processes - 1:
      arrival = handshakes.next_hello(deadline)
      if arrival is None:
        break
      hello, connection = arrival
      joined.append(connection)
      found = _hello_error(spec, peers, hello)
      if not found:
        found = _fingerprint_error(connection, hello, own_fingerprint)
      with contextlib.suppress(OSError):
        connection.sendall(_JOINED)
      peers.setdefault(hello.process_id, connection)
      if found and not error:
        error = found
        deadline = min(deadline, time.monotonic() + _ERROR_SECONDS)
  if not error and len(peers) < spec.num_processes - 1:
    error = _missing_error(spec, peers, timeout)
  for connection in joined:
    with contextlib.suppress(OSError):
      connection.sendall(f"{error}\n".encode())
    if error:
      connection.close()
  if error:
    raise UserError(error)
  return peers


def _join(
  spec: ProcessSpec,
  fingerprint: Mapping[str, str],
  deadline: float,
  timeout: float,
  token: str,
) -> socket.socket:
  """Return the connection of another process to process 0; raise UserError as `rendezvous` does."""
  while True:
    connection = _connect(spec, deadline, timeout)
    answer = _introduce(connection, spec, fingerprint, token)
    if answer == _JOINED:
      break
    connection.close()
    if answer == REFUSED or time.monotonic() > deadline:
      raise UserError(
        f"process 0 at coordinator_address={spec.address} did not accept this process, or is of "
        f"another run: see its output, and give all processes the same {TOKEN}"
      )
    time.sleep(_RETRY_SECONDS)  # process 0 has too many other connections, or is another program
  outcome = _read_line(connection, 2 * timeout)  # process 0 may have started later
  if outcome is None:
    error = (
      f"process 0 at coordinator_address={spec.address} closed the connection before all "
      f"{spec.num_processes} processes were connected: see its output"
    )
  else:
    error = outcome.decode(errors="replace").strip()
  if error:
    connection.close()
    raise UserError(error)
  return connection


def _introduce(
  connection: socket.socket,
  spec: ProcessSpec,
  fingerprint: Mapping[str, str],
  token: str,
) -> bytes | None:
  """Send this process's hello, and its fingerprint if requested; return the last answer, if any.

  Nothing is sent but a challenge before process 0 has proven that it has the token; REFUSED is
  returned if it has another.
  """
  challenge = parse_challenge(_read_line(connection, _ANSWER_SECONDS) or b"")
  if not challenge:
    return None
  hello = Hello(spec.num_processes, spec.process_id, digest(fingerprint))
  own_challenge = new_challenge()
  expected = proof_of_process_0(challenge, own_challenge, token)
  try:
    connection.sendall(f"{own_challenge}\n".encode())
    proof = _read_line(connection, _ANSWER_SECONDS) or b""
    if not hmac.compare_digest(proof, expected):
      return REFUSED if len(proof) == len(expected) else None
    connection.sendall(hello.line(challenge, token))
    answer = _read_line(connection, _ANSWER_SECONDS)
    if answer == _DESCRIBE:
      line = f"{json.dumps(fingerprint)}\n"
      connection.sendall(line.encode())
      answer = _read_line(connection, _ANSWER_SECONDS)
  except OSError:
    return None
  return answer


def bind_address(spec: ProcessSpec) -> str | None:
  """Return HOST:PORT at which process 0 listens, and JAX's coordinator after it.

  Returns None, which means all interfaces, if HOST is not an address of this host, but is
  translated to one.
  """
  named_host, port = spec.endpoint
  host = _listening_host(named_host)
  if not host:
    return None
  if ":" in host:
    return f"[{host}]:{port}"
  return f"{host}:{port}"


def _listening_host(host: str) -> str:
  """Return the address of this host that `host` names; empty if it names none.

  Loopback counts only if it is meant: Debian resolves a host's own name to 127.0.1.1, where other
  hosts cannot connect.
  """
  with contextlib.suppress(OSError, UnicodeError):
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
      ip = str(address[0])
      without_zone, _, _ = ip.partition("%")
      is_loopback = ipaddress.ip_address(without_zone).is_loopback
      if not is_loopback or host in ("localhost", ip):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
          probe.bind(address)
          return ip
  return ""


def _listen(spec: ProcessSpec) -> socket.socket:
  """Listen at the address of process 0; raise UserError if that is not possible."""
  named_host, port = spec.endpoint
  host = _listening_host(named_host)
  accepts_both = not host and socket.has_dualstack_ipv6()
  is_ipv6 = accepts_both or ":" in host
  try:
    return socket.create_server(
      (host, port),
      family=socket.AF_INET6 if is_ipv6 else socket.AF_INET,
      dualstack_ipv6=accepts_both,
      backlog=max(_BACKLOG, spec.num_processes),
    )
  except (OSError, OverflowError) as error:
    raise UserError(
      f"coordinator_address={spec.address}: process 0 cannot listen at that port ({error}); "
      "choose another"
    ) from None


def _hello_error(
  spec: ProcessSpec,
  peers: Collection[int],
  hello: Hello,
) -> str:
  """Return what is inconsistent in a process's message; empty: nothing."""
  rank = hello.process_id
  if hello.num_processes != spec.num_processes:
    return (
      f"process_id={rank} was started with num_processes={hello.num_processes}, process_id=0 with "
      f"num_processes={spec.num_processes}: give all the same"
    )
  if rank in peers:
    return f"two processes were started with process_id={rank}: give each a different one"
  return ""


def _fingerprint_error(
  connection: socket.socket,
  hello: Hello,
  fingerprint: Mapping[str, str],
) -> str:
  """Return in what the fingerprint of a process differs from process 0; empty: in nothing."""
  if hello.digest == digest(fingerprint):
    return ""
  with contextlib.suppress(OSError):
    connection.sendall(_DESCRIBE)
  line = _read_line(connection, _ANSWER_SECONDS, _FACTS_BYTES)
  others = parse_fingerprint(line or b"")
  if not others:
    return (
      f"process_id={hello.process_id} was started with another config or version than "
      "process_id=0: start all processes with the same"
    )
  return describe_difference(fingerprint, others, hello.process_id)


def _missing_error(
  spec: ProcessSpec,
  peers: Collection[int],
  timeout: float,
) -> str:
  """Return the error for the processes that did not connect in time."""
  missing = []
  for process_id in range(1, spec.num_processes):
    if process_id not in peers:
      missing.append(str(process_id))
  shown = ", ".join(missing[:_MAX_SHOWN])
  if len(missing) > _MAX_SHOWN:
    shown += ", ..."
  return (
    f"{len(missing)} of {spec.num_processes} processes did not connect to coordinator_address="
    f"{spec.address} in {timeout:g} s (jax_distributed_initialization_timeout): process_id "
    f"{shown}; start them, or correct num_processes"
  )


def _connect(
  spec: ProcessSpec,
  deadline: float,
  timeout: float,
) -> socket.socket:
  """Connect to process 0; raise UserError if it does not listen before the deadline."""
  while True:
    try:
      return socket.create_connection(spec.endpoint, timeout=_CONNECT_SECONDS)
    except (OSError, OverflowError) as error:
      if time.monotonic() > deadline:
        raise UserError(
          f"process 0 is not at coordinator_address={spec.address} after {timeout:g} s "
          f"(jax_distributed_initialization_timeout; {error}): start it there, or open the port"
        ) from None
    time.sleep(_RETRY_SECONDS)


def _read_line(
  connection: socket.socket,
  timeout: float,
  max_bytes: int = LINE_BYTES,
) -> bytes | None:
  """Read a line; None if it does not arrive. Bytes after it are left for the heartbeat."""
  deadline = time.monotonic() + timeout
  line = b""
  with contextlib.suppress(OSError):
    while len(line) < max_bytes:
      left_seconds = deadline - time.monotonic()
      connection.settimeout(max(left_seconds, 1e-3))
      waiting = connection.recv(LINE_BYTES, socket.MSG_PEEK)
      num_bytes = waiting.find(b"\n") + 1 or len(waiting)
      line += connection.recv(num_bytes)
      if not waiting or line.endswith(b"\n"):
        break
  connection.settimeout(None)
  if not line.endswith(b"\n"):
    return None
  return line
