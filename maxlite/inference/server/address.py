"""The address of the server; does not import JAX, so that a port in use is found early."""

import ipaddress
import socket

from maxlite.config.errors import UserError


def listen(host: str, port: int) -> socket.socket:
  """Return a socket that listens on host:port; clients wait until the server runs.

  Raises:
    UserError: the address cannot be bound.
  """
  try:
    family, _, _, _, address = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return socket.create_server(address[:2], family=family)  # type: ignore[arg-type]
  except OSError as error:
    raise UserError(
      f"serve_host={host} serve_port={port}: {str(error.strerror).partition(' (')[0]}: choose "
      "another serve_port (0: any free one), or an address of this machine"
    ) from None


def is_loopback(host: str) -> bool:
  """Return whether only this machine can reach a server that listens on `host`."""
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"


def url_host(host: str) -> str:
  """Return `host` as it is written in a URL: IPv6 addresses in brackets."""
  return f"[{host}]" if ":" in host else host


def allowed_hosts(host: str) -> list[str]:
  """Return the Host headers to accept if the server listens on `host`.

  On a loopback address other names are rejected: a web page could point them here (DNS rebinding).
  """
  return [url_host(host), "localhost", "127.0.0.1"] if is_loopback(host) else ["*"]
