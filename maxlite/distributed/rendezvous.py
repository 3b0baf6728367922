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
_HELLO_SECONDS = 5.0  # for one who came to say who it is


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
  """Which of how many processes this one is; process 0 listens at `address`, HOST:PORT."""

  address: str
  num_processes: int
  process_id: int

  @property
  def endpoint(self) -> tuple[str, int]:
    host, _, port = self.address.rpartition(":")
    return host.strip("[]"), int(port)


def rendezvous(place: ProcessSpec, timeout: float) -> dict[int, socket.socket]:
  """Connections by process: of process 0 to all others, of the others to process 0.

  The port is free again afterwards, for JAX to listen at.

  Raises:
    UserError: on all processes: one is missing after `timeout` seconds, two are the same, or they
      disagree on how many there are.
  """
  began = time.monotonic()
  if place.process_id == 0:
    return _gather(place, began + timeout, timeout)
  connection = _connect(place, began + timeout, timeout)
  _send(connection, {"num_processes": place.num_processes, "process_id": place.process_id})
  answer = _read(connection, began + 2 * timeout)  # process 0 may have begun later
  complaint = (
    answer["complaint"]
    if answer
    else (
      f"process 0 at coordinator_address={place.address} left before all {place.num_processes} "
      "processes were there: see what it says"
    )
  )
  if complaint:
    connection.close()
    raise UserError(complaint)
  return {0: connection}


def _gather(place: ProcessSpec, deadline: float, timeout: float) -> dict[int, socket.socket]:
  """Of process 0: waits for all others, tells them whether all is well."""
  peers: dict[int, socket.socket] = {}
  unfit: list[socket.socket] = []
  complaint = ""
  with _listen(place) as listener:
    while len(peers) < place.num_processes - 1 and not complaint:
      connection = _accept(listener, deadline)
      if connection is None:
        complaint = _missing(place, peers, timeout)
        break
      hello = _read(connection, time.monotonic() + _HELLO_SECONDS)
      complaint = _misfit(place, peers, hello) if hello else ""
      if hello and not complaint:
        peers[hello["process_id"]] = connection
      else:
        unfit.append(connection)
  for connection in (*peers.values(), *unfit):
    with contextlib.suppress(OSError):
      _send(connection, {"complaint": complaint})
  for connection in (*peers.values(), *unfit) if complaint else unfit:
    connection.close()
  if complaint:
    raise UserError(complaint)
  return peers


def _missing(place: ProcessSpec, peers: Mapping[int, object], timeout: float) -> str:
  absent = [str(n) for n in range(1, place.num_processes) if n not in peers]
  shown = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
  return (
    f"{len(absent)} of {place.num_processes} processes did not come to coordinator_address="
    f"{place.address} in {timeout:g} s (jax_distributed_initialization_timeout): process_id "
    f"{shown}; start them, or correct num_processes"
  )


def _misfit(place: ProcessSpec, peers: Mapping[int, object], hello: Mapping[str, int]) -> str:
  """What is wrong with one that says it is this; empty: nothing."""
  count, rank = hello["num_processes"], hello["process_id"]
  if count != place.num_processes:
    return (
      f"process_id={rank} was started with num_processes={count}, process_id=0 with "
      f"num_processes={place.num_processes}: give all the same"
    )
  if rank in peers:
    return f"two processes were started with process_id={rank}: give each its own"
  return ""


def _listen(place: ProcessSpec) -> socket.socket:
  _, port = place.endpoint
  both = socket.has_dualstack_ipv6()
  family = socket.AF_INET6 if both else socket.AF_INET
  try:
    return socket.create_server(
      ("", port), family=family, dualstack_ipv6=both, backlog=place.num_processes
    )
  except (OSError, OverflowError) as error:
    raise UserError(
      f"coordinator_address={place.address}: process 0 cannot listen at that port ({error}); "
      "choose another"
    ) from None


def _accept(listener: socket.socket, deadline: float) -> socket.socket | None:
  """Who comes next; None where nobody does in time."""
  listener.settimeout(max(deadline - time.monotonic(), 0.001))
  try:
    return listener.accept()[0]
  except TimeoutError:
    return None


def _connect(place: ProcessSpec, deadline: float, timeout: float) -> socket.socket:
  while True:
    try:
      return socket.create_connection(place.endpoint, timeout=_HELLO_SECONDS)
    except (OSError, OverflowError) as error:
      if time.monotonic() > deadline:
        raise UserError(
          f"process 0 is not at coordinator_address={place.address} after {timeout:g} s "
          f"(jax_distributed_initialization_timeout; {error}): start it there, or open the port"
        ) from None
    time.sleep(_RETRY_SECONDS)


def _send(connection: socket.socket, message: Mapping[str, object]) -> None:
  connection.sendall(json.dumps(message).encode() + b"\n")


def _read(connection: socket.socket, deadline: float) -> dict | None:
  """One message; None where none comes by then, or something else does."""
  text = b""
  while not text.endswith(b"\n") and len(text) < _MESSAGE_BYTES:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
      byte = connection.recv(1)  # what comes behind the message is for the watch
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
  known = isinstance(message, dict) and message.keys() & {"process_id", "complaint"}
  return message if known else None
