"""One client cannot occupy the HTTP server: time, bytes and connections are limited."""

import contextlib
import json
import socket
import time

import pytest
from tiny_server import Letters, ask, served

from maxlite.inference.batcher import Batcher
from maxlite.inference.server import http_server
from maxlite.inference.server.engine_thread import EngineThread


@pytest.fixture(scope="module")
def engine_thread(two_rows):
  """An engine of two rows, with a queue of three requests."""
  with EngineThread(Batcher(two_rows), queue_size=3).running() as engine_thread:
    yield engine_thread


@pytest.fixture(scope="module")
def service(engine_thread):
  with served(engine_thread) as service:
    yield service


def test_a_body_that_does_not_arrive_times_out(service, monkeypatch):
  monkeypatch.setattr("maxlite.inference.server.http_api.BODY_SECONDS", 0.1)
  head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
  with socket.create_connection(("127.0.0.1", service[0])) as connection:
    connection.sendall(f"{head}content-length: 9\r\n\r\n".encode())
    assert connection.recv(999).startswith(b"HTTP/1.1 400")


def test_a_body_may_take_longer_if_it_arrives(service, monkeypatch):
  monkeypatch.setattr("maxlite.inference.server.http_api.BODY_SECONDS", 0.3)
  monkeypatch.setattr("maxlite.inference.server.http_api.BODY_BYTES_PER_SECOND", 10)
  body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
  head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
  with socket.create_connection(("127.0.0.1", service[0])) as connection:
    connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
    for start in (0, 10, 20):
      connection.sendall(body[start : start + 10])
      time.sleep(0.2)
    connection.sendall(body[30:])
    assert connection.recv(999).startswith(b"HTTP/1.1 200")


def test_long_prompts_are_refused_without_tokenizing(service, monkeypatch):
  """They would all wait for the lock of the tokenizer, and other clients with them."""
  encoded = []
  monkeypatch.setattr(Letters, "encode", lambda self, text: encoded.append(len(text)) or [1])
  status, text = ask(service, "/v1/completions", {"prompt": ["a" * 9000]})
  assert (status, "9000 bytes" in text) == (400, True)
  message = {"role": "user", "content": "a" * 9000}
  assert ask(service, "/v1/chat/completions", {"messages": [message]})[0] == 400
  assert ask(service, "/v1/completions", {"prompt": ["a"] * 6})[0] == 400
  status, text = ask(service, "/v1/completions", {"prompt": "a" * 120_000})
  assert (status, "the body is longer than" in text) == (400, True)
  assert encoded == []


def open_connection(port, source="127.0.0.1"):
  return socket.create_connection(("127.0.0.1", port), source_address=(source, 0))


def test_an_address_has_a_limit_of_connections(engine_thread):
  with contextlib.ExitStack() as stack, served(engine_thread, max_per_address=3) as (port, _):
    first, *_ = [stack.enter_context(open_connection(port)) for _ in range(3)]
    with open_connection(port) as rejected:
      assert rejected.recv(999).endswith(b"\r\n\r\ntoo many connections from this address")
      assert rejected.recv(1) == b""
    with open_connection(port, "127.0.0.2") as other:
      other.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
      assert other.recv(999).startswith(b"HTTP/1.1 200")
    first.close()
    end = time.monotonic() + 5
    status = 429
    while status == 429 and time.monotonic() < end:
      status, _ = ask((port, engine_thread), "/health")
    assert status == 200


def test_a_network_of_ipv6_counts_as_one_address():
  assert http_server._network("2001:db8::1") == http_server._network("2001:db8::2:1")
  assert http_server._network("2001:db8::1") != http_server._network("2001:db8:0:1::1")
  assert http_server._network("::ffff:10.0.0.1") == http_server._network("10.0.0.1")


def test_a_client_that_does_not_read_is_disconnected(service, monkeypatch):
  monkeypatch.setattr(http_server, "WRITE_SECONDS", 0.3)
  request = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
  with socket.socket() as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", service[0]))
    connection.settimeout(5)
    assert is_disconnected_within(connection, 5, sending=request * 20)


def is_disconnected_within(connection, seconds, sending):
  """Whether the server disconnects a client that sends again and again, and never reads."""
  end = time.monotonic() + seconds
  connection.settimeout(seconds)
  while time.monotonic() < end:
    try:
      connection.sendall(sending)
    except TimeoutError:
      return False
    except ConnectionError:
      return True
    time.sleep(0.01)
  return False


def is_closed_within(connection, seconds):
  """Whether the server closes the connection, while single bytes of headers arrive."""
  end = time.monotonic() + seconds
  connection.settimeout(0.05)
  while time.monotonic() < end:
    try:
      connection.sendall(b"x")
      if not connection.recv(1):
        return True
    except TimeoutError:
      continue
    except ConnectionError:
      return True
  return False


@pytest.mark.parametrize("answered", [False, True], ids=["first", "next"])
def test_headers_that_arrive_byte_by_byte_time_out(service, monkeypatch, answered):
  monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.3)
  with socket.create_connection(("127.0.0.1", service[0])) as connection:
    if answered:
      connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
      assert connection.recv(999).startswith(b"HTTP/1.1 200")
    connection.sendall(b"GET / HTTP/1.1\r\nx-slow: ")
    assert is_closed_within(connection, 5)
