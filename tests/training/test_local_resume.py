"""A run goes on from its hosts' own checkpoints as if nothing had happened.

With real processes, of which one is killed, it takes minutes.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
from host_runs import ROOT
from test_many_hosts import LAST_BITS, LIGHT
from tiny import KEYS
from tiny_run import (
  STEPS,
  Output,
  assert_as_if_nothing_had_happened,
  checkpoint_steps,
  keys_in,
  logged,
  parameter_hash,
  start,
)

from maxlite.metrics.writers import read_rows


@pytest.fixture
def folder(runs_folder, request):
  """A folder of this test's own; of many processes Orbax wants no brackets in its path."""
  return runs_folder / re.sub(r"\W+", "_", request.node.name)


class CrashError(Exception):
  """The end of a process, as far as a run can tell."""


class Crashing(Output):
  """Ends the run at the line of a step."""

  def __init__(self, at):
    super().__init__()
    self._crash = f"step {at}/"

  def write(self, text):
    if text.startswith(self._crash):
      raise CrashError
    return super().write(text)


def test_a_crashed_run_goes_on_from_its_local_checkpoint(finished, folder):
  keys = {"local_checkpoint_directory": folder / "local", "local_checkpoint_period": 1}
  keys |= {"checkpoint_period": 6}
  with pytest.raises(CrashError):
    start(folder, Crashing(at=5), **keys)
  assert not (folder / "run/checkpoints").exists()
  code, output = start(folder, **keys)
  assert code == 0
  assert "step 4 is whole in the local checkpoints" in output
  assert "going on from the checkpoint of step 4" in output
  assert_as_if_nothing_had_happened(folder, output, finished)
  assert checkpoint_steps(folder) == [6, STEPS]
  assert not list((folder / "local").iterdir())


# ---- hosts, each with a folder of its own ----

SHARED, KILLED, END = 150, 180, 400  # steps; there is time to kill before the end
SHORT = LIGHT | {"steps": END, "learning_rate_schedule_steps": END, "eval_period": 0}
SHORT |= {"checkpoint_period": SHARED, "global_batch_size": 16}
LOCAL = {"local_checkpoint_directory": "local", "local_checkpoint_period": 3}
BY_DATA = {"ici_fsdp_parallelism": 1, "ici_data_parallelism": -1}  # both hold the whole state
BY_FSDP = {}
COPIES = {"local_checkpoint_replication": "true"}


class Hosts:
  """One start of the run in `folder` on several hosts, whose own folders are `folder`/RANK."""

  def __init__(self, folder, count=2, **keys):
    self._folder = folder
    words = [f"{n}={v}" for n, v in (KEYS | keys_in(folder, **SHORT | LOCAL | keys)).items()]
    words += [f"num_processes={count}", f"coordinator_address=127.0.0.1:{free_port()}"]
    more = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    more |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    self.processes = []
    for rank in range(count):
      (folder / str(rank)).mkdir(parents=True, exist_ok=True)
      command = [sys.executable, "-u", "-m", "maxlite.train", *words, f"process_id={rank}"]
      self.processes.append(
        subprocess.Popen(
          command,
          cwd=folder / str(rank),
          env=os.environ | more,
          stdout=subprocess.PIPE,
          stderr=subprocess.STDOUT,
          text=True,
        )
      )

  def kill_when(self, is_so, rank=1):
    """Ends the start by kill -9 of one process."""
    while not is_so():
      assert self.processes[rank].poll() is None, self.outputs()
      time.sleep(0.001)
    self.processes[rank].kill()
    assert self.outputs()

  def has_logged(self, step):
    path = self._folder / "run/metrics.jsonl"
    return lambda: path.exists() and any(row["step"] == step for row in read_rows(path))

  def outputs(self):
    return [process.communicate(timeout=600)[0] for process in self.processes]


def free_port():
  with socket.create_server(("127.0.0.1", 0)) as listener:
    return listener.getsockname()[1]


@pytest.fixture(scope="module")
def in_peace(runs_folder):
  """By mesh, (rows, hash of the parameters) of a run to which nothing happens."""
  found = {}

  def ends(mesh):
    name = "_".join(["local_peace", *mesh])
    if name not in found:
      found[name] = ending(runs_folder / name, Hosts(runs_folder / name, **mesh).outputs()[0])
    return found[name]

  return ends


def ending(folder, output):
  last = [line for line in output.splitlines() if "parameters " in line]
  assert last, output
  return logged(folder), parameter_hash(last[-1])


def nothing(folder):
  pass


def host_1_is_new(folder):
  shutil.rmtree(folder / "1")


def files_of_host_1_are_wrong(folder):
  for path in (folder / "1/local").rglob("*.safetensors"):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def hosts_trade_places(folder):
  (folder / "0").rename(folder / "2")
  (folder / "1").rename(folder / "0")
  (folder / "2").rename(folder / "1")


SENT = "; what process 1 has lost, others sent"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "copies", "happens", "says"),
  [
    (BY_FSDP, {}, nothing, "is whole in the local checkpoints"),
    (BY_DATA, {}, host_1_is_new, SENT),
    (BY_DATA, {}, files_of_host_1_are_wrong, SENT),
    (BY_FSDP, COPIES, host_1_is_new, SENT),
    (BY_FSDP, COPIES, files_of_host_1_are_wrong, SENT),
    (BY_FSDP, COPIES, hosts_trade_places, "is whole in the local checkpoints"),
    (BY_FSDP, {}, host_1_is_new, "are not whole on these hosts and this mesh: the shared one"),
  ],
)
def test_what_a_host_has_lost_another_has(in_peace, folder, mesh, copies, happens, says):
  killed = Hosts(folder, **mesh, **copies)
  killed.kill_when(killed.has_logged(KILLED))
  happens(folder)
  output = Hosts(folder, **mesh, **copies).outputs()[0]
  assert says in output, output
  step = int(re.search(r"going on from the checkpoint of step (\d+)", output)[1])
  assert step == SHARED if "shared" in says else SHARED < step < END
  assert ending(folder, output) == in_peace(mesh)


@pytest.mark.slow
def test_a_save_that_kill_ends_in_the_middle_was_none(in_peace, folder):
  killed = Hosts(folder, **BY_FSDP)
  after, own = killed.has_logged(4), folder / "1/local"
  killed.kill_when(lambda: after() and any(own.rglob("*.tmp")))
  output = Hosts(folder, **BY_FSDP).outputs()[0]
  assert "going on from the checkpoint of step" in output
  assert ending(folder, output) == in_peace(BY_FSDP)
  assert not list((folder / "1/local").rglob("*.*"))


@pytest.mark.slow
def test_on_fewer_hosts_the_shared_one_is_taken(in_peace, folder):
  killed = Hosts(folder, **BY_FSDP)
  killed.kill_when(killed.has_logged(KILLED))
  (output,) = Hosts(folder, count=1, **BY_FSDP).outputs()
  assert "are not whole on these hosts and this mesh: the shared one is taken" in output
  assert f"going on from the checkpoint of step {SHARED}" in output
  rows, _ = ending(folder, output)
  expected, _ = in_peace(BY_FSDP)
  assert len(rows) == len(expected) == END
  for row, other in zip(rows[: SHARED + 9], expected, strict=False):  # later, last bits add up
    assert row["loss"] == pytest.approx(other["loss"], rel=LAST_BITS)
