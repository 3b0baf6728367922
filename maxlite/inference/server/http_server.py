"""The HTTP server: uvicorn with limits on slow and on many clients, and a fast shutdown."""

import asyncio
import functools
import ipaddress
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from maxlite.inference.server.engine_thread import EngineThread

HEADER_SECONDS = 10.0  # from a connection, or the previous response, to the next request's headers
WRITE_SECONDS = 10.0  # to read what is ready to be sent, or to close a connection
_SHUTDOWN_SECONDS = 1  # for open connections after an interrupt
_EXTRA_CONNECTIONS = 200  # to answer requests that the full queue rejects
_IPV6_PREFIX = 64  # bits that identify a customer's network; one host may use any address in it
_TOO_MANY_CONNECTIONS = (
  b"HTTP/1.1 429 Too Many Requests\r\n"
  b"content-type: text/plain\r\n"
  b"content-length: 38\r\n"
  b"connection: close\r\n"
  b"\r\n"
  b"too many connections from this address"
)


class TimedProtocol(H11Protocol):
  """A connection that is closed if its client is too slow, or has too many connections.

  It is closed if no request arrives in time, even if single bytes do, and if the client does not
  read the responses.

  Args:
    max_per_address: connections of one address; 0: any number.
  """

  def __init__(self, *args: Any, max_per_address: int, **keywords: Any) -> None:
    super().__init__(*args, **keywords)
    self._max_per_address = max_per_address
    self._write_limit: asyncio.TimerHandle | None = None
    self.network = ""

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    super().connection_made(transport)
    if self.client:
      host, _ = self.client
      self.network = _network(host)
    if self._max_per_address and self._num_connections() > self._max_per_address:
      transport.write(_TOO_MANY_CONNECTIONS)
      self._close()
    else:
      self._close_without_request_after(None)

  def connection_lost(self, exc: Exception | None) -> None:
    self._end_write_limit()
    super().connection_lost(exc)

  def on_response_complete(self) -> None:
    self._close_without_request_after(self.cycle)
    super().on_response_complete()

  def pause_writing(self) -> None:
    super().pause_writing()
    if self._write_limit is None:
      self._write_limit = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

  def resume_writing(self) -> None:
    self._end_write_limit()
    super().resume_writing()

  def _end_write_limit(self) -> None:
    if self._write_limit is not None:
      self._write_limit.cancel()
      self._write_limit = None

  def _num_connections(self) -> int:
    """Number of connections of this client's network, with this one."""
    networks = [getattr(connection, "network", None) for connection in self.connections]
    return networks.count(self.network)

  def _close_without_request_after(self, previous: RequestResponseCycle | None) -> None:
    """Close the connection unless a request after `previous` arrives within HEADER_SECONDS."""

    def close_if_idle() -> None:
      if self.cycle is previous:
        self._close()

    self.loop.call_later(HEADER_SECONDS, close_if_idle)

  def _close(self) -> None:
    """Close the connection when all is sent, or after a time limit."""
    self.transport.close()
    self.loop.call_later(WRITE_SECONDS, self.transport.abort)


def _network(host: str) -> str:
  """The address of an IPv4 host, or the network of an IPv6 host."""
  try:
    address = ipaddress.ip_address(host.partition("%")[0])
  except ValueError:
    return host
  if address.version == 4:
    return host
  if address.ipv4_mapped:
    return str(address.ipv4_mapped)
  return str(ipaddress.ip_network((address, _IPV6_PREFIX), strict=False))


def server_config(
  app: Starlette, *, max_connections: int, max_per_address: int = 0, **options: Any
) -> uvicorn.Config:
  """The limits of a server of `app`.

  Args:
    max_connections: of all clients; more are answered with 503.
    max_per_address: connections of one address; 0: any number.
    **options: further arguments of `uvicorn.Config`.
  """
  protocol: Any = functools.partial(TimedProtocol, max_per_address=max_per_address)
  return uvicorn.Config(
    app,
    http=protocol,
    lifespan="off",
    limit_concurrency=max_connections,
    timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
    **options,
  )


class HttpServer(uvicorn.Server):
  """Serves `app`, which uses `engine_thread`, until interrupted.

  Args:
    **options: further arguments of `server_config`.
  """

  def __init__(self, app: Starlette, engine_thread: EngineThread, **options: Any) -> None:
    self._engine_thread = engine_thread
    max_connections = engine_thread.max_active + _EXTRA_CONNECTIONS
    super().__init__(server_config(app, max_connections=max_connections, **options))

  async def on_tick(self, counter: int) -> bool:
    """Return whether the server ends: after an interrupt, or without a program to run."""
    has_failed = self._engine_thread.compile_error is not None
    return has_failed or await super().on_tick(counter)

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """End the open requests with an error, then the connections."""
    self._engine_thread.fail_all(ConnectionError("the server is shutting down"))
    await super().shutdown(sockets)
