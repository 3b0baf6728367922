"""The HTTP server: uvicorn with a limit on slow clients and a fast shutdown."""

import asyncio
import socket
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from maxlite.inference.server.engine_thread import EngineThread

HEADER_SECONDS = 10.0  # from a connection, or the previous response, to the next request's headers
_SHUTDOWN_SECONDS = 1  # for open connections after an interrupt
_EXTRA_CONNECTIONS = 200  # to answer requests that the full queue rejects


class TimedProtocol(H11Protocol):
  """Closes a connection on which no request arrives in time, even if single bytes do."""

  def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
    super().connection_made(transport)
    self._close_without_request_after(None)

  def on_response_complete(self) -> None:
    self._close_without_request_after(self.cycle)
    super().on_response_complete()

  def _close_without_request_after(self, previous: Any) -> None:
    is_same = lambda: self.cycle is previous
    self.loop.call_later(HEADER_SECONDS, lambda: self.transport.close() if is_same() else None)


class HttpServer(uvicorn.Server):
  """Serves `app`, which uses `engine_thread`, until interrupted."""

  def __init__(self, app: Starlette, engine_thread: EngineThread, **options: Any) -> None:
    self._engine_thread = engine_thread
    limit = engine_thread.max_active + _EXTRA_CONNECTIONS
    limits = {"limit_concurrency": limit, "timeout_graceful_shutdown": _SHUTDOWN_SECONDS}
    super().__init__(uvicorn.Config(app, http=TimedProtocol, lifespan="off", **limits, **options))

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """End the open requests with an error, then the connections."""
    self._engine_thread.fail_all(ConnectionError("the server is shutting down"))
    await super().shutdown(sockets)
