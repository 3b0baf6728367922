"""Process discovery, the rendezvous and the heartbeat."""

import concurrent.futures
import contextlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.slow_cases import slow

from maxlite.config.schema import HostsConfig
from maxlite.distributed import jax_private
from maxlite.distributed.heartbeat import EXIT_PEER_LOST, Heartbeat
from maxlite.distributed.initialize import (
  LaunchEnvironment,
  detect_process,
  local_devices,
  read_environment,
  resolve_process,
)
from maxlite.distributed.rendezvous import ProcessSpec, bind_address, rendezvous
from maxlite.errors import UserError

SLURM = {
  "SLURM_JOB_ID": "4097",
  "SLURM_STEP_NODELIST": "gpu[007-009,12],big1",
  "SLURM_NTASKS": "10",
  "SLURM_PROCID": "5",
  "SLURM_LOCALID": "1",
  "SLURM_NODEID": "1",
  "SLURM_STEP_TASKS_PER_NODE": "4(x2),2",
}
OPEN_MPI = {
  "OMPI_COMM_WORLD_SIZE": "4",
  "OMPI_COMM_WORLD_RANK": "3",
  "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
  "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
URI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"}


@pytest.mark.parametrize(
  ("environment", "launch"),
  [
    ({}, LaunchEnvironment()),
    (SLURM, LaunchEnvironment(10, 5, "gpu007:61441", 4, 1)),
    (
      SLURM | {"SLURM_STEP_NODELIST": "a7,b2", "SLURM_NODEID": "2"},
      LaunchEnvironment(10, 5, "a7:61441", 2, 1),
    ),
    (SLURM | {"JAX_COORDINATOR_ADDRESS": "b:1"}, LaunchEnvironment(10, 5, "b:1", 4, 1)),
    # In a batch script, without srun: a single process.
    ({k: v for k, v in SLURM.items() if "STEP" not in k}, LaunchEnvironment()),
    (OPEN_MPI | URI, LaunchEnvironment(4, 3, "10.96.0.1:62624", 2, 1)),
    (OPEN_MPI, LaunchEnvironment(4, 3, "", 2, 1)),
    ({"JOB_COMPLETION_INDEX": "2"}, LaunchEnvironment(process_id=2)),
  ],
)
def test_launchers_are_read_from_the_environment(environment, launch):
  assert read_environment(environment) == launch


def hosts_config(keys):
  address, num_processes, process_id = keys
  return HostsConfig(
    coordinator_address=address, num_processes=num_processes, process_id=process_id
  )


@pytest.mark.parametrize(
  ("keys", "launch", "spec"),
  [
    (("", -1, -1), LaunchEnvironment(), None),
    (("", -1, -1), LaunchEnvironment(process_id=2), None),  # JAX detects Kubernetes
    (("", 1, -1), LaunchEnvironment(10, 5, "a:1"), ProcessSpec("", 1, 0)),
    (("", -1, -1), LaunchEnvironment(1, 0, "a:1"), ProcessSpec("", 1, 0)),
    (("a:1", 4, 2), LaunchEnvironment(), ProcessSpec("a:1", 4, 2)),
    (("", -1, -1), LaunchEnvironment(10, 5, "a:1"), ProcessSpec("a:1", 10, 5)),
    (("b:2", -1, -1), LaunchEnvironment(10, 5, "a:1"), ProcessSpec("b:2", 10, 5)),
    (("b:2", 4, -1), LaunchEnvironment(process_id=2), ProcessSpec("b:2", 4, 2)),
  ],
)
def test_keys_override_the_environment(keys, launch, spec):
  assert resolve_process(hosts_config(keys), launch) == spec


@pytest.mark.parametrize(
  ("keys", "launch", "message"),
  [
    (("", 4, 2), LaunchEnvironment(), "coordinator_address=HOST:PORT of process 0"),
    (("", -1, -1), LaunchEnvironment(4, 3), "(not given) for process_id=3 of num_processes=4"),
    (("a", 4, 2), LaunchEnvironment(), "coordinator_address=a "),
    (("a:1", -1, 2), LaunchEnvironment(), "write num_processes=N process_id=I"),
    (("a:1", 4, -1), LaunchEnvironment(), "write num_processes=N process_id=I"),
    (("a:1", 4, 4), LaunchEnvironment(), "from 0 to 3, or num_processes=5"),
  ],
)
def test_an_incomplete_process_spec_is_an_error(keys, launch, message):
  with pytest.raises(UserError, match=re.escape(message)):
    resolve_process(hosts_config(keys), launch)


class Cluster:
  """A stand-in for Kubernetes or Cloud TPU in JAX's cluster detection."""

  __name__ = "Cluster"
  name = "test"
  opt_in_only_method = False

  def __init__(self, address="a:8482", broken=None):
    self._address = address
    self._broken = broken

  def is_env_present(self):
    return True

  def get_coordinator_address(self, timeout_secs, override_coordinator_port):
    if self._broken:
      raise self._broken
    return self._address

  def get_process_count(self):
    return 4

  def get_process_id(self):
    return 3

  def get_local_process_id(self):
    return None


def test_jax_detects_a_cluster_that_no_key_specifies(monkeypatch):
  monkeypatch.setattr(jax_private.ClusterEnv, "_cluster_types", [Cluster()])
  assert detect_process("", 1) == ProcessSpec("a:8482", 4, 3)
  assert detect_process("b:1", 1) == ProcessSpec("b:1", 4, 3)
  monkeypatch.setattr(jax_private.ClusterEnv, "_cluster_types", [])
  assert detect_process("", 1) == ProcessSpec("", 1, 0)
  with pytest.raises(ValueError, match="JAX_COORDINATOR_ADDRESS=b:1 without the number of"):
    detect_process("b:1", 1)
  monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")
  with pytest.raises(ValueError, match="this is pod 2 of an indexed job"):
    detect_process("", 1)


@pytest.mark.parametrize("error", [RuntimeError("no such\nservice"), KeyError("job-name")])
def test_a_failed_detection_is_an_error_of_one_line(monkeypatch, error):
  monkeypatch.setattr(jax_private.ClusterEnv, "_cluster_types", [Cluster(broken=error)])
  with pytest.raises(ValueError, match="JAX does not find the other processes") as refused:
    detect_process("", 1)
  assert "\n" not in str(refused.value)
  assert "num_processes=1 to train with one process" in str(refused.value)


def test_jax_without_cluster_detection_is_an_error(monkeypatch):
  monkeypatch.setattr(jax_private, "ClusterEnv", None)
  with pytest.raises(UserError, match=r"has no jax\._src\.clusters.* num_processes=1 for"):
    detect_process("", 1)


FOUND_BY_JAX = """
import sys
from maxlite.config.schema import HostsConfig
from maxlite.distributed.initialize import distributed_runtime
from maxlite.distributed.jax_private import ClusterEnv
class Cluster(ClusterEnv):
  is_env_present = classmethod(lambda cls: True)
  get_coordinator_address = classmethod(lambda cls, **_: sys.argv[1])
  get_process_count = classmethod(lambda cls: 3)
  get_process_id = classmethod(lambda cls: int(sys.argv[2]))
try:
  with distributed_runtime(HostsConfig("", -1, -1, 3, 10), {}):
    pass
except ValueError as error:
  sys.exit(str(error))
"""


@pytest.mark.slow
def test_a_missing_process_of_a_detected_cluster_is_named_on_all():
  address = free_address()
  command = [sys.executable, "-c", FOUND_BY_JAX, address]
  running = []
  for rank in ("0", "2"):
    running.append(subprocess.Popen([*command, rank], stderr=subprocess.PIPE, text=True))
  for process in running:
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    last = errors.splitlines()[-1]
    assert last.startswith(f"1 of 3 processes did not connect to coordinator_address={address}")


@pytest.mark.parametrize(
  ("launch", "environment", "devices"),
  [
    (LaunchEnvironment(), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, []),
    (LaunchEnvironment(2, 1, "", 1, 0), {}, []),
    (LaunchEnvironment(8, 5, "", 4, 1), {}, [1]),
    (LaunchEnvironment(8, 5, "", 4, 1), {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}, [2, 3]),
    (
      LaunchEnvironment(8, 5, "", 4, 1),
      {"CUDA_VISIBLE_DEVICES": "1"},
      [],
    ),  # SLURM's --gpus-per-task
    (LaunchEnvironment(8, 5, "", 4, 1), {"JAX_LOCAL_DEVICE_IDS": "7"}, None),
  ],
)
def test_processes_of_a_host_divide_its_devices(launch, environment, devices):
  assert local_devices(launch, environment) == devices


def test_devices_that_cannot_be_divided_are_an_error():
  with pytest.raises(UserError, match="3 processes on this host cannot share 4 GPUs"):
    local_devices(LaunchEnvironment(3, 0, "", 3, 0), {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})


def free_address():
  with socket.create_server(("127.0.0.1", 0)) as listener:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def rendezvous_of(specs, timeout=10.0):
  """For each process, its peers or its exception."""
  with concurrent.futures.ThreadPoolExecutor(len(specs)) as pool:
    futures = [pool.submit(rendezvous, spec, timeout) for spec in specs]
  return [future.exception() or future.result() for future in futures]


def test_all_connect_to_process_0_and_the_port_is_free_again():
  address = free_address()
  for _ in range(2):
    specs = [ProcessSpec(address, 3, rank) for rank in (2, 0, 1)]
    of_2, of_0, of_1 = rendezvous_of(specs)
    assert sorted(of_0) == [1, 2]
    assert sorted(of_1) == [0]
    assert sorted(of_2) == [0]
    # Each has a separate connection.
    of_0[1].sendall(b"1")
    of_0[2].sendall(b"2")
    assert of_1[0].recv(1) == b"1"
    assert of_2[0].recv(1) == b"2"
    for peers in (of_0, of_1, of_2):
      for connection in peers.values():
        connection.close()


@pytest.mark.parametrize(
  ("ranks", "message"),
  [
    ([(4, 0), (4, 2)], "2 of 4 processes did not connect to"),
    ([(4, 1)], "process 0 is not at coordinator_address="),
    ([(2, 0), (3, 2)], "process_id=2 was started with num_processes=3, process_id=0 with"),
    ([(3, 0), (3, 1), (3, 1)], "two processes were started with process_id=1"),
  ],
)
def test_an_inconsistent_rendezvous_fails_on_all_in_time(ranks, message):
  address = free_address()
  specs = [ProcessSpec(address, num_processes, rank) for num_processes, rank in ranks]
  began = time.monotonic()
  for error in rendezvous_of(specs, timeout=1.0):
    assert isinstance(error, UserError)
    assert message in str(error)
  assert time.monotonic() - began < 5


def connect(address):
  """A connection to process 0 as soon as it listens."""
  while True:
    try:
      return socket.create_connection(ProcessSpec(address, 2, 0).endpoint, timeout=10)
    except ConnectionRefusedError:
      time.sleep(0.01)


WRONG_PROOF = b"2 1 " + b"0" * 64 + b" " + b"0" * 64 + b"\n"
# (what a stranger sends, the answer after the challenge).
STRANGERS = (
  (b"GET / HTTP/1.1\n", []),
  (b'{"process_id": 1}\n', []),
  (b"[" * 4096, []),
  (WRONG_PROOF, [b"refused"]),
)


def test_strangers_are_ignored_and_delay_nothing():
  address = free_address()
  began = time.monotonic()
  with concurrent.futures.ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as strangers:
    first = pool.submit(rendezvous, ProcessSpec(address, 2, 0), 60.0, "secret")
    for text, answer in STRANGERS:
      stranger = strangers.enter_context(connect(address))
      stranger.sendall(text)
      _challenge, *answers = stranger.makefile("rb").read().splitlines()
      assert answers == answer
    silent = strangers.enter_context(connect(address))
    silent.sendall(b"no line")  # and nothing more, while the connection stays open
    second = pool.submit(rendezvous, ProcessSpec(address, 2, 1), 60.0, "secret")
  assert list(first.result()) == [1]
  assert list(second.result()) == [0]
  first.result()[1].close()
  second.result()[0].close()
  assert time.monotonic() - began < 5


def test_a_process_with_another_token_is_ignored():
  address = free_address()
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    first = pool.submit(rendezvous, ProcessSpec(address, 2, 0), 1.0, "secret")
    second = pool.submit(rendezvous, ProcessSpec(address, 2, 1), 1.0, "another")
  assert "1 of 2 processes did not connect" in str(first.exception())
  assert "give all processes the same MAXLITE_COORDINATOR_TOKEN" in str(second.exception())


def test_process_0_listens_on_the_address_of_the_coordinator_only():
  address = free_address()
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    alone = pool.submit(rendezvous, ProcessSpec(address, 2, 0), 1.0)
    connect(address).close()
    with pytest.raises(ConnectionRefusedError):
      socket.create_connection(("127.0.0.2", ProcessSpec(address, 2, 0).endpoint[1])).close()
    assert isinstance(alone.exception(), UserError)


@pytest.mark.parametrize(
  ("address", "found", "bound"),
  [
    ("127.0.0.1:1", "127.0.0.1", "127.0.0.1:1"),
    ("localhost:1", "127.0.0.1", "127.0.0.1:1"),
    ("[::1]:1", "::1", "[::1]:1"),
    ("me:1", "127.0.1.1", None),  # a host's own name in Debian's /etc/hosts
    ("gateway:1", "192.0.2.1", None),  # translated to an address of this host
  ],
)
def test_all_interfaces_only_if_the_address_is_none_of_this_host(
  address, found, bound, monkeypatch
):
  family = socket.AF_INET
  if ":" in found:
    family = socket.AF_INET6
  infos = [(family, socket.SOCK_STREAM, 0, "", (found, 0))]
  monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
  assert bind_address(ProcessSpec(address, 2, 0)) == bound


def test_a_port_in_use_is_an_error():
  with socket.create_server(("127.0.0.1", 0)) as listener:
    port = listener.getsockname()[1]
    with pytest.raises(ValueError, match="cannot listen at that port"):
      rendezvous(ProcessSpec(f"127.0.0.1:{port}", 2, 0), 1.0)


def test_a_reason_arrives_from_a_process_that_exits_with_unread_messages():
  address = free_address()
  first, second = rendezvous_of([ProcessSpec(address, 2, 0), ProcessSpec(address, 2, 1)])
  Heartbeat(0, first, 60.0)  # not started
  with second[0] as peer:
    with first[1] as connection:
      connection.sendall(b"alive\n")
      peer.sendall(b"alive\n")
      for message in (b"alive\n", b"failed disk full\n"):
        connection.sendall(message)
    received = b""
    with contextlib.suppress(ConnectionResetError):
      while text := peer.recv(100):
        received += text
  assert received.endswith(b"failed disk full\n")


PROCESS = """
import os, signal, sys, time
from maxlite.distributed.heartbeat import Heartbeat, report_step
from maxlite.distributed.rendezvous import ProcessSpec, rendezvous
from maxlite.distributed.watchdog import Watchdog
address, count, rank, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
peers = rendezvous(ProcessSpec(address, count, rank), 20)
with Heartbeat(rank, peers, 1.5) as heartbeat:
  if what == "gather":
    rounds = [heartbeat.all_gather({"rank": rank, "round": n}) for n in range(2)]
    assert rounds == [[{"rank": each, "round": n} for each in range(count)] for n in range(2)]
  if what == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
  if what == "stop":
    report_step(439)
    time.sleep(0.7)  # two heartbeats
    os.kill(os.getpid(), signal.SIGSTOP)
  if what == "behind":
    report_step(439)
  if what == "hang":
    with Watchdog(1) as watchdog:
      watchdog.expect_step(440)
      time.sleep(60)
  if what == "fail":
    raise OSError("no space left")
  if what == "refuse":
    try:
      raise ValueError("wrong key")
    except ValueError:
      raise SystemExit(2) from None
  time.sleep(0 if what in ("end", "gather") else 3 if what == "late" else 60)
"""


def processes(acts):
  """{rank: (exit code, stderr)} of processes with these actions; a stopped one is killed."""
  address = free_address()
  command = [sys.executable, "-c", PROCESS, address, str(len(acts))]
  running = {}
  for rank, act in enumerate(acts):
    arguments = [*command, str(rank), act]
    running[rank] = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
  stopped = [rank for rank, act in enumerate(acts) if act == "stop"]
  others = [rank for rank, act in enumerate(acts) if act != "stop"]
  ended = {}
  for rank in (*others, *stopped):
    process = running[rank]
    if rank in stopped:
      process.kill()
    _, errors = process.communicate(timeout=30)
    ended[rank] = (process.returncode, errors)
  return ended


HOST = socket.gethostname()
LOST = {
  "kill": (-signal.SIGKILL, "process {} died"),
  "stop": (
    -signal.SIGKILL,
    f"process {{}} on {HOST} was last heard 2 s ago, at step 439; the limit",
  ),
  "hang": (1, f"process {{}} on {HOST}: step 440 took longer than 1 s (step_timeout_seconds)"),
  "fail": (1, "process {} failed: OSError: no space left"),
  "refuse": (2, "process {} failed: wrong key"),
}


@pytest.mark.parametrize("other", [False, slow(True)])
@pytest.mark.parametrize(
  ("act", "lost"), [("kill", 0), ("stop", 2), ("hang", 1), slow("fail", 0), slow("refuse", 2)]
)
def test_if_one_is_lost_all_exit_with_one_line_that_names_it(act, lost, other):
  code, message = LOST[act]
  if other:
    lost = 2 - lost
  acts = ["work"] * 3
  acts[lost] = act
  ended = processes(acts)
  exit_code, _ = ended.pop(lost)
  assert exit_code == code
  for survivor, (exit_code, errors) in ended.items():
    assert exit_code == EXIT_PEER_LOST
    assert errors.startswith(f"process {survivor} exits: {message.format(lost)}")
    assert errors.count("\n") == 1


def test_a_process_that_waits_names_those_that_are_behind():
  ended = processes(["hang", "behind"])
  code, errors = ended[0]
  step = "step 440 took longer than 1 s (step_timeout_seconds)"
  start = rf"{re.escape(step)}; process 1 on {HOST} was last heard \d s ago, at step 439; threads:"
  assert code == 1
  assert re.match(start, errors)
  assert ended[1] == (EXIT_PEER_LOST, f"process 1 exits: process 0 on {HOST}: {step}\n")


ALL_FINISHED = {0: (0, ""), 1: (0, ""), 2: (0, "")}


def test_values_are_gathered_in_order_of_process_id():
  assert processes(["gather", "gather", "gather"]) == ALL_FINISHED


def test_a_finished_process_may_exit_before_the_others():
  assert processes(["end", "late", "end"]) == ALL_FINISHED
