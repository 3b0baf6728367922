"""Rendezvous of all processes of a run at process 0: all are present and agree, or all fail.

A process sends a hello with the proof that it belongs to the run (visitors.py). Process 0 answers
that it has joined, or first requests what both must have in common (agreement.py) if it differs. At
the end, process 0 sends the outcome: a line with an error, or an empty line.
"""

import contextlib
import dataclasses
import ipaddress
import json
import socket
import time
from collections.abc import Collection, Mapping

from maxlite.config.errors import UserError
from maxlite.distributed.agreement import describe_difference, digest, parse_facts
from maxlite.distributed.visitors import LINE_BYTES, REFUSED, Hello, Visitors

TOKEN = "MAXLITE_COORDINATOR_TOKEN"  # environment variable: a secret that a run's processes share
_JOINED, _DESCRIBE = b"joined\n", b"describe\n"  # answers to a hello
_FACTS_BYTES = 1 << 20
_ANSWER_SECONDS = 10.0  # for an answer to a challenge, a hello or a request
_CONNECT_SECONDS, _RETRY_SECONDS = 5.0, 0.2
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
    host, _, port = self.address.rpartition(":")
    return host.strip("[]"), int(port)


def rendezvous(
  spec: ProcessSpec, timeout: float, token: str = "", facts: Mapping[str, str] | None = None
) -> dict[int, socket.socket]:
  """{process id: connection} from process 0 to all others, or from another process to process 0.

  The port is free again afterwards, for JAX's coordinator.

  Args:
    facts: {name: value} of what all processes must have in common; None: nothing.

  Raises:
    UserError: on all processes, if one is missing after `timeout` seconds, two have the same id, or
      they disagree on the number of processes or on the facts.
  """
  deadline = time.monotonic() + timeout
  if spec.process_id > 0:
    return {0: _join(spec, facts or {}, deadline, timeout, token)}
  joined: list[socket.socket] = []
  peers: dict[int, socket.socket] = {}
  error = ""
  with _listen(spec) as listener, Visitors(listener, token, spec.num_processes) as visitors:
    while len(joined) < spec.num_processes - 1:
      arrival = visitors.next_hello(deadline)
      if arrival is None:
        break
      hello, connection = arrival
      joined.append(connection)
      found = _hello_error(spec, peers, hello) or _facts_error(connection, hello, facts or {})
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
  spec: ProcessSpec, facts: Mapping[str, str], deadline: float, timeout: float, token: str
) -> socket.socket:
  """The connection of another process to process 0."""
  while True:
    connection = _connect(spec, deadline, timeout)
    answer = _introduce(connection, spec, facts, token)
    if answer == _JOINED:
      break
    connection.close()
    if answer == REFUSED or time.monotonic() > deadline:
      raise UserError(
        f"process 0 at coordinator_address={spec.address} did not accept this process: see its "
        f"output, and give all processes the same {TOKEN}"
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
  connection: socket.socket, spec: ProcessSpec, facts: Mapping[str, str], token: str
) -> bytes | None:
  """Send this process's hello, and its facts if requested; return the last answer, if any."""
  challenge = _read_line(connection, _ANSWER_SECONDS)
  if challenge is None:
    return None
  hello = Hello(spec.num_processes, spec.process_id, digest(facts))
  try:
    connection.sendall(hello.line(challenge.decode(errors="replace").strip(), token))
    answer = _read_line(connection, _ANSWER_SECONDS)
    if answer == _DESCRIBE:
      connection.sendall(json.dumps(facts).encode() + b"\n")
      answer = _read_line(connection, _ANSWER_SECONDS)
  except OSError:
    return None
  return answer


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
      (host, port), family=family, dualstack_ipv6=dual, backlog=max(_BACKLOG, spec.num_processes)
    )
  except (OSError, OverflowError) as error:
    raise UserError(
      f"coordinator_address={spec.address}: process 0 cannot listen at that port ({error}); "
      "choose another"
    ) from None


def _hello_error(spec: ProcessSpec, peers: Collection[int], hello: Hello) -> str:
  """What is inconsistent in a process's message; empty: nothing."""
  rank = hello.process_id
  if hello.num_processes != spec.num_processes:
    return (
      f"process_id={rank} was started with num_processes={hello.num_processes}, process_id=0 with "
      f"num_processes={spec.num_processes}: give all the same"
    )
  if rank in peers:
    return f"two processes were started with process_id={rank}: give each a different one"
  return ""


def _facts_error(connection: socket.socket, hello: Hello, facts: Mapping[str, str]) -> str:
  """Which facts of a process differ from those of process 0; empty: none."""
  if hello.digest == digest(facts):
    return ""
  with contextlib.suppress(OSError):
    connection.sendall(_DESCRIBE)
  others = parse_facts(_read_line(connection, _ANSWER_SECONDS, _FACTS_BYTES) or b"")
  if not others:
    return (
      f"process_id={hello.process_id} was started with another config or version than "
      "process_id=0: start all processes with the same"
    )
  return describe_difference(facts, others, hello.process_id)


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


def _read_line(
  connection: socket.socket, timeout: float, max_bytes: int = LINE_BYTES
) -> bytes | None:
  """A line; None if it does not arrive. Bytes after it are left for the heartbeat."""
  deadline = time.monotonic() + timeout
  line = b""
  with contextlib.suppress(OSError):
    while len(line) < max_bytes:
      connection.settimeout(max(deadline - time.monotonic(), 1e-3))
      waiting = connection.recv(LINE_BYTES, socket.MSG_PEEK)
      num_bytes = waiting.find(b"\n") + 1 or len(waiting)
      line += connection.recv(num_bytes)
      if not waiting or line.endswith(b"\n"):
        break
  connection.settimeout(None)
  return line if line.endswith(b"\n") else None
