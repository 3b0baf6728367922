"""What all processes of a run must have in common, and connections that belong to none."""

import concurrent.futures
import contextlib
import errno
import re
import socket
import threading
import time

import pytest

from maxlite.config import load_config
from maxlite.config.schema import DEFAULTS
from maxlite.distributed import handshake
from maxlite.distributed.config_check import (
  config_fingerprint,
  describe_difference,
  digest,
  parse_fingerprint,
)
from maxlite.distributed.handshake import Handshakes
from maxlite.distributed.rendezvous import ProcessSpec, rendezvous
from maxlite.errors import UserError
from maxlite.runs.open_run import join_hosts

# Processes of which each runs JAX alone, so that threads of a test can be those that meet.
SEPARATE = (
  "dataset_type=synthetic",
  "members=[{name: a}, {name: b, init_weights_seed: 1}]",
  "ensemble_strategy=submesh",
)
MAY_DIFFER = {"jax_cache_dir": "/a", "process_id": 5, "serve_api_key": "secret"}


def free_address():
  with socket.create_server(("127.0.0.1", 0)) as listener:
    return f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
  ("key", "value", "value_0"),
  [("learning_rate", 0.5, 0.002), ("data_shuffle_seed", 5, 0), ("base_emb_dim", 64, 256)],
)
def test_a_process_with_another_config_ends_all_in_one_line(key, value, value_0, capsys):
  address = free_address()

  def join(rank):
    hosts = [f"coordinator_address={address}", "num_processes=2", f"process_id={rank}"]
    own = [f"{key}={value}", f"jax_cache_dir=/host{rank}"] if rank else []
    with join_hosts(load_config([*SEPARATE, *hosts, *own]), "maxlite.train"):
      pass

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    errors = [each.exception() for each in [pool.submit(join, 0), pool.submit(join, 1)]]
  assert [getattr(error, "code", error) for error in errors] == [2, 2]
  line = (
    f"maxlite.train: process_id=1 was started with {key}={value}, process_id=0 with "
    f"{key}={value_0}: start all processes with the same config and versions\n"
  )
  assert capsys.readouterr().err == 2 * line


def fingerprint_of(**keys):
  return config_fingerprint(DEFAULTS | keys, {"jax_enable_x64": False})


def test_the_fingerprint_is_of_all_keys_but_those_of_one_host(monkeypatch):
  fingerprint = fingerprint_of()
  assert len(fingerprint) > 150
  assert digest(fingerprint_of(**MAY_DIFFER)) == digest(fingerprint)
  assert "secret" not in str(fingerprint_of(**MAY_DIFFER))
  assert digest(config_fingerprint(DEFAULTS, {"jax_enable_x64": True})) != digest(fingerprint)
  for name, value in (("steps", 7), ("mlp_activations", ("gelu",)), ("run_name", "other")):
    assert digest(fingerprint_of(**{name: value})) != digest(fingerprint)
  monkeypatch.setenv("XLA_FLAGS", fingerprint["XLA_FLAGS"] + " --xla_dump_to=/host")
  assert fingerprint_of() == fingerprint
  monkeypatch.setenv("XLA_FLAGS", fingerprint["XLA_FLAGS"] + " --xla_allow_excess_precision=false")
  assert digest(fingerprint_of()) != digest(fingerprint)


def test_versions_and_the_part_of_a_long_value_that_differs_are_named():
  members = "".join(f"{{name: m{n:02d}}}" for n in range(100))
  ours = {"jax": "0.10.2", "members": members}
  theirs = {"jax": "0.10.1", "members": members.replace("m57", "other")}
  message = describe_difference(ours, theirs, 3)
  assert message.startswith("process_id=3 was started with jax=0.10.1 members=...")
  assert "{name: other}" in message
  assert ", process_id=0 with jax=0.10.2 members=..." in message
  assert "{name: m57}" in message
  assert len(message) < 500


@pytest.mark.parametrize("text", [b"", b"[" * 99_999, b"[1]", b'{"a": 1}', b'{"a": "\xff"}'])
def test_a_text_that_is_no_fingerprint_is_ignored(text):
  assert parse_fingerprint(text) == {}


def test_a_terminal_gets_no_control_characters_of_others():
  assert parse_fingerprint(b'{"a": "\\u001b[2J"}') == {"a": r"'\x1b[2J'"}


def connect(address):
  """A connection to process 0 that has read its challenge."""
  while True:
    with contextlib.suppress(ConnectionRefusedError):
      connection = socket.create_connection(ProcessSpec(address, 2, 0).endpoint, timeout=10)
      connection.recv(100)
      return connection
    time.sleep(0.01)


def test_many_idle_strangers_close_the_oldest(monkeypatch):
  monkeypatch.setattr(handshake, "_MIN_HANDSHAKES", 3)
  address = free_address()
  with concurrent.futures.ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
    first = pool.submit(rendezvous, ProcessSpec(address, 2, 0), 20.0)
    strangers = [stack.enter_context(connect(address)) for _ in range(5)]
    assert [stranger.recv(1) for stranger in strangers[:2]] == [b"", b""]
    strangers[2].settimeout(0.05)
    with pytest.raises(TimeoutError):
      strangers[2].recv(1)
    second = pool.submit(rendezvous, ProcessSpec(address, 2, 1), 20.0)
    assert [list(first.result()), list(second.result())] == [[1], [0]]
  for peers in (first.result(), second.result()):
    peers.popitem()[1].close()


def test_a_stranger_is_closed_although_it_sends_bytes(monkeypatch):
  monkeypatch.setattr(handshake, "_HANDSHAKE_SECONDS", 0.3)
  with contextlib.ExitStack() as stack:
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    unproven = stack.enter_context(Handshakes(listener, "", 2))
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
    waiting = pool.submit(unproven.next_hello, time.monotonic() + 1.5)
    stranger = stack.enter_context(socket.create_connection(listener.getsockname()))
    with contextlib.suppress(OSError):  # once it is closed
      while waiting.running():
        stranger.sendall(b"1")
        time.sleep(0.01)
    assert waiting.running()
    assert waiting.result() is None


class Exhausted(socket.socket):
  """A listener of a process that may open no more files."""

  def accept(self):
    raise OSError(errno.EMFILE, "too many open files")


def test_process_0_does_not_spin_if_it_may_open_no_more_files():
  with contextlib.ExitStack() as stack:
    listener = socket.create_server(("127.0.0.1", 0))
    exhausted = stack.enter_context(Exhausted(fileno=listener.detach()))
    stack.enter_context(socket.create_connection(exhausted.getsockname()))
    unproven = stack.enter_context(Handshakes(exhausted, "", 2))
    began = time.thread_time()
    assert unproven.next_hello(time.monotonic() + 0.5) is None
    assert time.thread_time() - began < 0.1


class Impostor:
  """A program at the address of process 0, which speaks its protocol without the run's token."""

  def __init__(self, stack, proof):
    self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
    self.received = b""
    self.proof = proof
    threading.Thread(target=self.serve, daemon=True).start()

  def serve(self):
    with contextlib.suppress(OSError):
      while True:
        connection, _ = self.listener.accept()
        with connection, contextlib.suppress(OSError):
          connection.settimeout(1)
          connection.sendall(f"{handshake.new_challenge()}\n".encode())
          challenge = connection.recv(4096)
          self.received += challenge
          connection.sendall(self.proof(challenge))
          for answer in (b"", b"describe\n", b"joined\n", b"\n"):
            connection.sendall(answer)
            self.received += connection.recv(1 << 20)


@pytest.mark.parametrize(
  "proof",
  [
    lambda challenge: b"describe\n",
    lambda challenge: challenge,
    lambda challenge: b"0" * 64 + b"\n",
    lambda challenge: handshake.proof_of_process_0("0" * 32, challenge.decode().strip(), "wrong"),
  ],
)
def test_a_process_tells_nothing_to_whoever_listens_at_the_address(proof):
  fingerprint = {"run_name": "confidential"}
  with contextlib.ExitStack() as stack:
    impostor = Impostor(stack, proof)
    with pytest.raises(UserError, match="give all processes the same MAXLITE_COORDINATOR_TOKEN"):
      rendezvous(ProcessSpec(impostor.address, 2, 1), 0.5, "secret", fingerprint)
  assert re.fullmatch(rb"([0-9a-f]{32}\n)+", impostor.received)  # challenges, which are random


def test_an_answer_of_process_0_cannot_be_used_again():
  """Its proof depends on the challenges of both sides."""
  proofs = {
    handshake.proof_of_process_0(one, other, token)
    for one in ("1" * 32, "2" * 32)
    for other in ("1" * 32, "2" * 32)
    for token in ("", "secret")
  }
  assert len(proofs) == 8
