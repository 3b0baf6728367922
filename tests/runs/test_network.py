"""Two hosts in separate Linux network namespaces, connected by a link that can be cut."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.host_runs import ROOT, arguments_of
from support.tiny import KEYS
from support.tiny_run import keys_in

HOSTS = ("maxlite-a", "maxlite-b")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LONG = {
  "decoder_block": "llama",
  "base_num_decoder_layers": 1,
  "gradient_accumulation_steps": 1,
  "ema_decay": 0,
  "steps": 400,
  "learning_rate_schedule_steps": 400,
  "eval_interval": 0,
  "log_period": 10,
  "checkpoint_period": 100,
  "max_num_checkpoints_to_keep": 2,
  "jax_distributed_heartbeat_timeout_seconds": 20,
}


def ip(*arguments):
  subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def network():
  """Two hosts, each with an address and a name."""
  if os.geteuid() or not shutil.which("ip"):
    pytest.skip("network namespaces need root and iproute2's ip")
  remove()
  try:
    for host in HOSTS:
      ip("netns", "add", host)
  except subprocess.CalledProcessError as error:
    pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
  ip(
    "link", "add", "link-a", "netns", HOSTS[0], "type", "veth", "peer", "link-b", "netns", HOSTS[1]
  )
  for host, address in zip(HOSTS, ADDRESSES, strict=True):
    ip("-n", host, "address", "add", f"{address}/24", "dev", link_of(host))
    ip("-n", host, "link", "set", "lo", "up")
    ip("-n", host, "link", "set", link_of(host), "up")
    folder = Path("/etc/netns", host)  # the namespace sees its files in /etc
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {os.uname().nodename}\n")
  yield
  remove()


def remove():
  for host in HOSTS:
    subprocess.run(["ip", "netns", "delete", host], check=False, capture_output=True)
    shutil.rmtree(Path("/etc/netns", host), ignore_errors=True)


def link_of(host):
  return f"link-{host[-1]}"


@contextlib.contextmanager
def on_both(folder, port):
  """[(process, log) of each host] for one start of the run in `folder`."""
  folder.mkdir(parents=True, exist_ok=True)
  arguments = arguments_of(KEYS | keys_in(folder, **LONG))
  arguments += [f"coordinator_address={ADDRESSES[0]}:{port}", "num_processes=2"]
  environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": ""}
  with contextlib.ExitStack() as stack:
    started = []
    for rank, host in enumerate(HOSTS):
      path = folder / f"{host}.{time.monotonic_ns()}.log"
      log = stack.enter_context(path.open("wb"))
      train = [sys.executable, "-u", "-m", "maxlite.train", *arguments, f"process_id={rank}"]
      process = subprocess.Popen(
        ["ip", "netns", "exec", host, *train], stdout=log, stderr=log, env=environment
      )
      stack.callback(process.kill)
      started.append((process, path))
    yield started


def codes_of(started, seconds):
  deadline = time.monotonic() + seconds
  return [process.wait(max(deadline - time.monotonic(), 0)) for process, _ in started]


@pytest.mark.slow
def test_a_cut_link_ends_both_hosts_and_a_restart_resumes(network, folder):
  with on_both(folder / "uninterrupted", 7001) as started:
    assert codes_of(started, 600) == [0, 0], started[0][1].read_text()
    (expected,) = re.findall(r"parameters (\w+)", started[0][1].read_text())

  with on_both(folder / "cut", 7002) as started:
    output = started[0][1].read_text
    while not re.search("^step +150/", output(), re.M):
      assert started[0][0].poll() is None, output()
      time.sleep(0.05)
    ip("-n", HOSTS[0], "link", "set", link_of(HOSTS[0]), "down")
    cut_at = time.monotonic()
    codes = codes_of(started, 120)
    print(f"left {time.monotonic() - cut_at:.1f} s after the cut, with codes {codes}")
    assert 0 not in codes
    for rank, (_, log) in enumerate(started):
      lost = rf"process {rank} exits: process {1 - rank} .*"
      assert re.search(lost, log.read_text()), log.read_text()

  ip("-n", HOSTS[0], "link", "set", link_of(HOSTS[0]), "up")
  with on_both(folder / "cut", 7003) as started:
    assert codes_of(started, 600) == [0, 0], started[0][1].read_text()
    output = started[0][1].read_text()
  assert "resuming from the checkpoint of step 100" in output
  assert re.findall(r"parameters (\w+)", output) == [expected]
