"""Resuming from local checkpoints is bitwise identical to an uninterrupted run.

The tests with several processes, one of which is killed, take minutes.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time

import pytest
from support.host_runs import LAST_BITS, LIGHT, ROOT, arguments_of
from support.tiny import KEYS
from support.tiny_run import (
  STEPS,
  Output,
  assert_equals_uninterrupted,
  checkpoint_steps,
  keys_in,
  logged,
  parameter_hash,
  start,
)

from maxlite.metrics.writers import read_rows


@pytest.fixture
def folder(runs_folder, request):
  """A folder per test; Orbax with several processes does not support brackets in the path."""
  return runs_folder / re.sub(r"\W+", "_", request.node.name)


class CrashError(Exception):
  """Simulates the death of the process."""


class Crashing(Output):
  """Output that raises CrashError when the line of a step is printed."""

  def __init__(self, at):
    super().__init__()
    self._crash = f"step {at}/"

  def write(self, text):
    if text.startswith(self._crash):
      raise CrashError
    return super().write(text)


@pytest.mark.slow
def test_a_crashed_run_resumes_from_its_local_checkpoint(finished, folder):
  keys = {"local_checkpoint_directory": folder / "local", "local_checkpoint_period": 1}
  keys |= {"checkpoint_period": 6}
  with pytest.raises(CrashError):
    start(folder, Crashing(at=5), **keys)
  assert not (folder / "run/checkpoints").exists()
  code, output = start(folder, **keys)
  assert code == 0
  assert "step 4 is complete in the local checkpoints" in output
  assert "resuming from the checkpoint of step 4" in output
  assert_equals_uninterrupted(folder, output, finished)
  assert checkpoint_steps(folder) == [6, STEPS]
  assert not list((folder / "local").iterdir())


# ---- several hosts with separate folders ----

# steps, with enough time to kill the run before the end
SHARED = 150
KILLED = 180
END = 400
SHORT = LIGHT | {"steps": END, "learning_rate_schedule_steps": END, "eval_interval": 0}
SHORT |= {"checkpoint_period": SHARED, "global_batch_size": 16}
LOCAL = {"local_checkpoint_directory": "local", "local_checkpoint_period": 3}
BY_DATA = {
  "ici_fsdp_parallelism": 1,
  "ici_data_parallelism": -1,
}  # both have the whole state
BY_FSDP = {}
COPIES = {"local_checkpoint_replication": "true"}


class Hosts:
  """A start of the run in `folder` with a process per host, in the folders `folder`/RANK."""

  def __init__(self, folder, count=2, **keys):
    self._folder = folder
    overrides = arguments_of(KEYS | keys_in(folder, **SHORT | LOCAL | keys))
    overrides += [f"num_processes={count}", f"coordinator_address=127.0.0.1:{free_port()}"]
    more = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    more |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    self.processes = []
    for rank in range(count):
      (folder / str(rank)).mkdir(parents=True, exist_ok=True)
      command = [sys.executable, "-u", "-m", "maxlite.train", *overrides, f"process_id={rank}"]
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

  def kill_when(self, condition, rank=1):
    """Kill one process with SIGKILL once `condition()` holds."""
    while not condition():
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
def uninterrupted(runs_folder):
  """Function from a mesh to (rows, parameter hash) of an uninterrupted run."""
  found = {}

  def result(mesh):
    name = "_".join(["local_uninterrupted", *mesh])
    if name not in found:
      found[name] = final(runs_folder / name, Hosts(runs_folder / name, **mesh).outputs()[0])
    return found[name]

  return result


def final(folder, output):
  last = [line for line in output.splitlines() if "parameters " in line]
  assert last, output
  return logged(folder), parameter_hash(last[-1])


def keep_files(folder):
  pass


def lose_host_1(folder):
  shutil.rmtree(folder / "1")


def damage_host_1(folder):
  for path in (folder / "1/local").rglob("*.slices"):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def swap_hosts(folder):
  (folder / "0").rename(folder / "2")
  (folder / "1").rename(folder / "0")
  (folder / "2").rename(folder / "1")


RECEIVED = "; process 1 received its slices from others"


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "copies", "event", "message"),
  [
    (BY_FSDP, {}, keep_files, "is complete in the local checkpoints"),
    (BY_DATA, {}, lose_host_1, RECEIVED),
    (BY_DATA, {}, damage_host_1, RECEIVED),
    (BY_FSDP, COPIES, lose_host_1, RECEIVED),
    (BY_FSDP, COPIES, damage_host_1, RECEIVED),
    (BY_FSDP, COPIES, swap_hosts, "is complete in the local checkpoints"),
    (BY_FSDP, {}, lose_host_1, "are incomplete on these hosts and this mesh: using the shared one"),
  ],
)
def test_lost_files_are_received_from_another_host(
  uninterrupted, folder, mesh, copies, event, message
):
  killed = Hosts(folder, **mesh, **copies)
  killed.kill_when(killed.has_logged(KILLED))
  event(folder)
  output = Hosts(folder, **mesh, **copies).outputs()[0]
  assert message in output, output
  step = int(re.search(r"resuming from the checkpoint of step (\d+)", output)[1])
  assert step == SHARED if "shared" in message else SHARED < step < END
  assert final(folder, output) == uninterrupted(mesh)


@pytest.mark.slow
def test_a_save_interrupted_by_a_kill_is_ignored(uninterrupted, folder):
  killed = Hosts(folder, **BY_FSDP)
  after = killed.has_logged(4)
  own = folder / "1/local"
  killed.kill_when(lambda: after() and any(own.rglob("*.tmp")))
  output = Hosts(folder, **BY_FSDP).outputs()[0]
  assert "resuming from the checkpoint of step" in output
  assert final(folder, output) == uninterrupted(BY_FSDP)
  assert not list((folder / "1/local").rglob("*.*"))


@pytest.mark.slow
def test_fewer_hosts_resume_from_the_shared_checkpoint(uninterrupted, folder):
  killed = Hosts(folder, **BY_FSDP)
  killed.kill_when(killed.has_logged(KILLED))
  (output,) = Hosts(folder, count=1, **BY_FSDP).outputs()
  assert "are incomplete on these hosts and this mesh: using the shared one" in output
  assert f"resuming from the checkpoint of step {SHARED}" in output
  rows, _ = final(folder, output)
  expected, _ = uninterrupted(BY_FSDP)
  assert len(rows) == len(expected) == END
  for row, other in zip(rows[: SHARED + 9], expected, strict=False):
    assert row["loss"] == pytest.approx(other["loss"], rel=LAST_BITS)
