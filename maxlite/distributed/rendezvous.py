"""Rendezvous of all processes of a run at process 0: all are present and agree, or all fail."""

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Mapping

from maxlite.config.errors import UserError

_MESSAGE_BYTES = 4096
_RETRY_SECONDS = 0.2
_HELLO_SECONDS = 5.0  # for a connected peer to identify itself


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


def rendezvous(spec: ProcessSpec, timeout: float) -> dict[int, socket.socket]:
  """{process id: connection} from process 0 to all others, or from another process to process 0.

  The port is free again afterwards, for JAX's coordinator.

  Raises:
    UserError: on all processes, if one is missing after `timeout` seconds, two have the same id, or
      they disagree on the number of processes.
  """
  deadline = time.monotonic() + timeout
  if spec.process_id == 0:
    return _accept_all(spec, deadline, timeout)
  connection = _connect(spec, deadline, timeout)
  _send(connection, {"num_processes": spec.num_processes, "process_id": spec.process_id})
  answer = _read(connection, deadline + timeout)  # process 0 may have started later
  error = (
    answer["error"]
    if answer
    else (
      f"process 0 at coordinator_address={spec.address} exited before all {spec.num_processes} "
      "processes were connected: see its output"
    )
  )
  if error:
    connection.close()
    raise UserError(error)
  return {0: connection}


def _accept_all(spec: ProcessSpec, deadline: float, timeout: float) -> dict[int, socket.socket]:
  """On process 0: waits for all others, and sends them the outcome."""
  peers: dict[int, socket.socket] = {}
  rejected: list[socket.socket] = []
  error = ""
  with _listen(spec) as listener:
    while len(peers) < spec.num_processes - 1 and not error:
      connection = _accept(listener, deadline)
      if connection is None:
        error = _missing_error(spec, peers, timeout)
        break
      hello = _read(connection, time.monotonic() + _HELLO_SECONDS)
      error = _hello_error(spec, peers, hello) if hello else ""
      if hello and not error:
        peers[hello["process_id"]] = connection
      else:
        rejected.append(connection)
  for connection in (*peers.values(), *rejected):
    with contextlib.suppress(OSError):
      _send(connection, {"error": error})
  for connection in (*peers.values(), *rejected) if error else rejected:
    connection.close()
  if error:
    raise UserError(error)
  return peers


def _missing_error(spec: ProcessSpec, peers: Mapping[int, object], timeout: float) -> str:
  missing = [str(n) for n in range(1, spec.num_processes) if n not in peers]
  shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
  return (
    f"{len(missing)} of {spec.num_processes} processes did not connect to coordinator_address="
    f"{spec.address} in {timeout:g} s (jax_distributed_initialization_timeout): process_id "
    f"{shown}; start them, or correct num_processes"
  )


def _hello_error(spec: ProcessSpec, peers: Mapping[int, object], hello: Mapping[str, int]) -> str:
  """What is inconsistent in a peer's message; empty: nothing."""
  count, rank = hello["num_processes"], hello["process_id"]
  if count != spec.num_processes:
    return (
      f"process_id={rank} was started with num_processes={count}, process_id=0 with "
      f"num_processes={spec.num_processes}: give all the same"
    )
  if rank in peers:
    return f"two processes were started with process_id={rank}: give each a different one"
  return ""


def _listen(spec: ProcessSpec) -> socket.socket:
  _, port = spec.endpoint
  dual = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if dual else socket.AF_INET
  try:
    return socket.create_server(
      ("", port), family=family, dualstack_ipv6=dual, backlog=spec.num_processes
    )
  except (OSError, OverflowError) as error:
    raise UserError(
      f"coordinator_address={spec.address}: process 0 cannot listen at that port ({error}); "
      "choose another"
    ) from None


def _accept(listener: socket.socket, deadline: float) -> socket.socket | None:
  """The next connection; None if there is none until the deadline."""
  listener.settimeout(max(deadline - time.monotonic(), 0.001))
  try:
    return listener.accept()[0]
  except TimeoutError:
    return None


def _connect(spec: ProcessSpec, deadline: float, timeout: float) -> socket.socket:
  while True:
    try:
      return socket.create_connection(spec.endpoint, timeout=_HELLO_SECONDS)
    except (OSError, OverflowError) as error:
      if time.monotonic() > deadline:
        raise UserError(
          f"process 0 is not at coordinator_address={spec.address} after {timeout:g} s "
          f"(jax_distributed_initialization_timeout; {error}): start it there, or open the port"
        ) from None
    time.sleep(_RETRY_SECONDS)


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
  connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, deadline: float) -> dict | None:
  """One message; None if there is none until the deadline, or it is malformed."""
  text = b""
  while not text.endswith(b"\n") and len(text) < _MESSAGE_BYTES:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
      byte = connection.recv(1)  # bytes after the message belong to the heartbeat
    except OSError:
      return None
    if not byte:
      return None
    text += byte
  connection.settimeout(None)
  try:
    message = json.loads(text)
  except ValueError:
    return None
  is_valid = isinstance(message, dict) and message.keys() & {"process_id", "error"}
  return message if is_valid else None
