"""The address of the server and its key; does not import JAX, so that mistakes are found early."""

import ipaddress
import os
import socket

from maxlite.config.rules.path_rules import is_header_text
from maxlite.config.schema import ServeConfig
from maxlite.errors import UserError, write_line

API_KEY_VARIABLE = "MAXLITE_SERVE_API_KEY"


def read_api_key(cfg: ServeConfig) -> str:
  """Return the key that clients must send: the config's, else the environment's, or "".

  Raises:
    UserError: no HTTP header can hold the key of the environment.
  """
  if cfg.serve_api_key:
    return cfg.serve_api_key
  api_key = os.environ.get(API_KEY_VARIABLE, "")
  if not is_header_text(api_key):
    raise UserError(
      f"{API_KEY_VARIABLE} has a character that HTTP headers cannot have: export visible ASCII "
      "without spaces"
    )
  return api_key


def warn_if_open(host: str, api_key: str) -> None:
  """Warn of a server that other machines can use without a key."""
  if not api_key and not is_loopback(host):
    write_line(
      f"warning: serve_host={host} lets other machines use this server without a key: set "
      f"serve_api_key or {API_KEY_VARIABLE}"
    )


def listen(host: str, port: int) -> socket.socket:
  """Return a socket that listens on host:port; clients wait until the server runs.

  Raises:
    UserError: the address cannot be bound.
  """
  try:
    family, _, _, _, address = min(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return socket.create_server(address[:2], family=family)
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
  if ":" in host:
    return f"[{host}]"
  return host


def allowed_hosts(host: str) -> list[str]:
  """Return the Host headers to accept if the server listens on `host`.

  On a loopback address other names are rejected: a web page could point them here (DNS rebinding).
  """
  if is_loopback(host):
    return [url_host(host), "localhost", "127.0.0.1"]
  return ["*"]
