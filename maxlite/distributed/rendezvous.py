"""Rendezvous of all processes of a run at process 0: all are present and agree, or all fail.

Process 0 sends a random challenge to whatever connects. A process answers with the number of
processes, its id, and a proof: the HMAC of all three with the run's token. Connections without the
proof are ignored. At the end, process 0 sends the outcome: a line with an error, or an empty line.
"""

import contextlib
import dataclasses
import hmac
import ipaddress
import re
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Iterator

from maxlite.config.errors import UserError

TOKEN = "MAXLITE_COORDINATOR_TOKEN"  # environment variable: a secret that a run's processes share
_LINE_BYTES = 4096
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.2
_HELLO = r"(\d{1,9}) (\d{1,9}) ([0-9a-f]{64})\n"


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
  """The address of process 0 (HOST:PORT), the number of processes, and the id of this one."""

  address: str
  num_processes: int
  process_id: int

  @property
  def endpoint(self) -> tuple[str, int]:
    host, _, port = self.address.rpartition(":")
    return host.strip("[]"), int(port)


def rendezvous(spec: ProcessSpec, timeout: float, token: str = "") -> dict[int, socket.socket]:
  """{process id: connection} from process 0 to all others, or from another process to process 0.

  The port is free again afterwards, for JAX's coordinator.

  Raises:
    UserError: on all processes, if one is missing after `timeout` seconds, two have the same id, or
      they disagree on the number of processes.
  """
  deadline = time.monotonic() + timeout
  if spec.process_id > 0:
    return {0: _join(spec, deadline, timeout, token)}
  peers: dict[int, socket.socket] = {}
  joined, error = [], ""
  with _listen(spec) as listener:
    for count, rank, connection in _hellos(listener, deadline, token):
      joined.append(connection)
      error = _hello_error(spec, peers, count, rank)
      peers.setdefault(rank, connection)
      if error or len(peers) == spec.num_processes - 1:
        break
    else:
      error = _missing_error(spec, peers, timeout)
  for connection in joined:
    with contextlib.suppress(OSError):
      connection.sendall(f"{error}\n".encode())
    if error:
      connection.close()
  if error:
    raise UserError(error)
  return peers


def _join(spec: ProcessSpec, deadline: float, timeout: float, token: str) -> socket.socket:
  """The connection of another process to process 0."""
  connection = _connect(spec, deadline, timeout)
  challenge = _read_line(connection, timeout) or ""
  count, rank = spec.num_processes, spec.process_id
  with contextlib.suppress(OSError):
    proof = _proof(token, challenge, count, rank)
    connection.sendall(f"{count} {rank} {proof}\n".encode())
  error = _read_line(connection, 2 * timeout)  # process 0 may have started later
  if error is None:
    error = (
      f"process 0 at coordinator_address={spec.address} closed the connection before all {count} "
      f"processes were connected: see its output, and give all processes the same {TOKEN}"
    )
  if error:
    connection.close()
    raise UserError(error)
  return connection


def bind_address(spec: ProcessSpec) -> str | None:
  """HOST:PORT at which process 0 listens, and JAX's coordinator after it; None: on all interfaces.

  The latter if HOST is not an address of this host, but is translated to one.
  """
  host, port = _listening_host(spec.endpoint[0]), spec.endpoint[1]
  return f"[{host}]:{port}" if ":" in host else f"{host}:{port}" if host else None


def _listening_host(host: str) -> str:
  """The address of this host that `host` names; empty if it names none.

  Loopback counts only if it is meant: Debian resolves a host's own name to 127.0.1.1, where other
  hosts cannot connect.
  """
  with contextlib.suppress(OSError, UnicodeError):
    for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
      ip = str(address[0])
      is_loopback = ipaddress.ip_address(ip.partition("%")[0]).is_loopback
      if not is_loopback or host in ("localhost", ip):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
          probe.bind(address)
          return ip
  return ""


def _listen(spec: ProcessSpec) -> socket.socket:
  host, port = _listening_host(spec.endpoint[0]), spec.endpoint[1]
  dual = not host and socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if dual or ":" in host else socket.AF_INET
  try:
    return socket.create_server(
      (host, port), family=family, dualstack_ipv6=dual, backlog=spec.num_processes
    )
  except (OSError, OverflowError) as error:
    raise UserError(
      f"coordinator_address={spec.address}: process 0 cannot listen at that port ({error}); "
      "choose another"
    ) from None


def _hellos(
  listener: socket.socket, deadline: float, token: str
) -> Iterator[tuple[int, int, socket.socket]]:
  """(number of processes, process id, connection) of each process that connects in time."""
  with selectors.DefaultSelector() as selector, contextlib.ExitStack() as visitors:
    selector.register(listener, selectors.EVENT_READ)
    while (seconds := deadline - time.monotonic()) > 0:
      for key, _ in selector.select(seconds):
        if key.fileobj is listener:
          with contextlib.suppress(OSError):
            visitor = visitors.enter_context(listener.accept()[0])
            challenge = secrets.token_hex(16)
            visitor.sendall(f"{challenge}\n".encode())
            selector.register(visitor, selectors.EVENT_READ, (visitor, challenge, bytearray()))
          continue
        visitor, challenge, text = key.data
        received = b""
        with contextlib.suppress(OSError):
          received = visitor.recv(_LINE_BYTES)
        text += received
        if received and not text.endswith(b"\n") and len(text) < _LINE_BYTES:
          continue
        selector.unregister(visitor)
        if hello := _verify(text.decode("ascii", "replace"), challenge, token):
          yield *hello, socket.socket(fileno=visitor.detach())
        visitor.close()


def _verify(text: str, challenge: str, token: str) -> tuple[int, int] | None:
  """(number of processes, process id) of a hello with the right proof, else None."""
  found = re.fullmatch(_HELLO, text)
  if found is None:
    return None
  count, rank = int(found[1]), int(found[2])
  is_proven = hmac.compare_digest(found[3], _proof(token, challenge, count, rank))
  return (count, rank) if is_proven and 0 < rank < count else None


def _proof(token: str, challenge: str, count: int, rank: int) -> str:
  return hmac.new(token.encode(), f"{challenge} {count} {rank}".encode(), "sha256").hexdigest()


def _hello_error(spec: ProcessSpec, peers: Collection[int], count: int, rank: int) -> str:
  """What is inconsistent in a process's message; empty: nothing."""
  if count != spec.num_processes:
    return (
      f"process_id={rank} was started with num_processes={count}, process_id=0 with "
      f"num_processes={spec.num_processes}: give all the same"
    )
  if rank in peers:
    return f"two processes were started with process_id={rank}: give each a different one"
  return ""


def _missing_error(spec: ProcessSpec, peers: Collection[int], timeout: float) -> str:
  missing = [str(n) for n in range(1, spec.num_processes) if n not in peers]
  shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
  return (
    f"{len(missing)} of {spec.num_processes} processes did not connect to coordinator_address="
    f"{spec.address} in {timeout:g} s (jax_distributed_initialization_timeout): process_id "
    f"{shown}; start them, or correct num_processes"
  )


def _connect(spec: ProcessSpec, deadline: float, timeout: float) -> socket.socket:
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


def _read_line(connection: socket.socket, timeout: float) -> str | None:
  """A line; None if it does not arrive. Bytes after it are left for the heartbeat."""
  connection.settimeout(timeout)
  line = b""
  with contextlib.suppress(OSError), connection.makefile("rb", buffering=0) as unbuffered:
    line = unbuffered.readline(_LINE_BYTES)
  connection.settimeout(None)
  return line.decode(errors="replace").strip() if line.endswith(b"\n") else None
