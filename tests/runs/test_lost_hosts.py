"""If one host fails, no other is left waiting, and a restart gives the results of no failure.

With real processes, which takes minutes.
"""

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.host_runs import (
  LAST_BITS,
  LIGHT,
  ROOT,
  Launch,
  arguments_of,
  children,
  largest_difference,
  run,
)
from support.tiny import KEYS
from support.tiny_run import checkpoint_steps, keys_in, logged, parameter_hash

from maxlite.distributed.heartbeat import EXIT_PEER_LOST
from maxlite.metrics.writers import read_rows

pytestmark = pytest.mark.slow
SHORT = LIGHT | {
  "steps": 40,
  "learning_rate_schedule_steps": 40,
  "eval_interval": 0,
  "checkpoint_period": 4,
  "global_batch_size": 16,
  "max_num_checkpoints_to_keep": 40,
}
ENDLESS = SHORT | {"steps": 10**6, "max_num_checkpoints_to_keep": 3}
# Python programs on one device import the package from here.
ENVIRONMENT = os.environ | {
  "PYTHONPATH": str(ROOT),
  "XLA_FLAGS": "",
  "JAX_NUM_CPU_DEVICES": "1",
}


@pytest.fixture
def folder(runs_folder, request):
  """A separate folder per test; with multiple processes Orbax rejects brackets in its path."""
  return runs_folder / re.sub(r"\W+", "_", request.node.name)


@pytest.fixture(scope="module")
def uninterrupted(runs_folder):
  """(folder, output) of the run on two hosts without a failure."""
  folder = runs_folder / "peace"
  return folder, run(folder, processes=2, **SHORT)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_all_and_a_restart_gives_the_same_result(uninterrupted, folder, rank):
  launch = Launch(folder, processes=2, restarts=1, **SHORT)
  launch.wait_for(r"^\[0\] step +9/")
  os.kill(launch.process_id(rank), signal.SIGKILL)
  assert launch.wait() == 0, launch.output
  assert f"[{1 - rank}] process {1 - rank} exits: process {rank} died" in launch.output
  assert "restart 1 of 1 after code 137" in launch.output
  assert "resuming from the checkpoint of step" in launch.output
  expected_folder, expected_output = uninterrupted
  assert logged(folder) == logged(expected_folder)
  reports = [line for line in launch.output.splitlines() if "parameters" in line]
  assert parameter_hash(reports[-1]) == parameter_hash(expected_output.splitlines()[-1])
  last_row = read_rows(folder / "run/metrics.jsonl")[-1]
  assert last_row["restart_share"] > 0


def test_a_restart_on_fewer_hosts_uses_the_same_batches(uninterrupted, folder):
  launch = Launch(folder, processes="4,2", devices=1, restarts=1, **SHORT)
  launch.wait_for(r"^\[0\] step +9/")
  os.kill(launch.process_id(3), signal.SIGKILL)
  assert launch.wait() == 0, launch.output
  assert "process 1 of 2: 1 of 2 devices" in launch.output
  assert largest_difference(folder, uninterrupted[0]) < LAST_BITS


def test_a_hung_process_is_lost_after_the_heartbeat_timeout(folder):
  launch = Launch(folder, processes=2, **ENDLESS, jax_distributed_heartbeat_timeout_seconds=5)
  launch.wait_for(r"^\[0\] step +9/")
  os.kill(launch.process_id(0), signal.SIGSTOP)
  assert launch.wait() == EXIT_PEER_LOST
  late = r"\[1\] process 1 exits: process 0 on \S+ was last heard \d s ago, at step \d+; the limit"
  assert re.search(late, launch.output)


def test_a_hung_step_ends_with_the_stacks_of_all_threads(folder):
  launch = Launch(folder, processes=2, **ENDLESS, step_timeout_seconds=60)
  launch.wait_for(r"^\[0\] step +9/")
  os.kill(launch.process_id(1), signal.SIGSTOP)
  assert launch.wait() == 1
  reported = r"^\[0\] (step|the checkpoint of step) \d+ took longer than 60 s"
  assert re.search(reported, launch.output, re.M)
  assert "in run_training" in launch.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_saves_on_all_at_the_same_step(folder, number):
  launch = Launch(folder, processes=2, restarts=3, **ENDLESS)
  launch.wait_for(r"^\[0\] step +9/")
  os.kill(launch.process_id(1), number)
  assert launch.wait() == 128 + signal.SIGTERM
  assert "restart" not in launch.output.replace("restart 0", "")
  step = int(re.search(r"stopped by SIGTERM; left after step (\d+) of", launch.output)[1])
  assert checkpoint_steps(folder)[-1] == step
  output = run(folder, processes=2, **ENDLESS | {"steps": step + 2})
  assert f"resuming from the checkpoint of step {step}" in output
  assert [row["step"] for row in logged(folder)] == list(range(1, step + 3))


def test_a_signal_to_the_launcher_reaches_all_processes(folder):
  launch = Launch(folder, processes=2, restarts=3, **ENDLESS)
  launch.wait_for(r"^\[0\] step +9/")
  launch.process.send_signal(signal.SIGTERM)
  assert launch.wait() == 128 + signal.SIGTERM
  assert "stopped by SIGTERM; left after step" in launch.output


def test_no_process_outlives_a_killed_launcher(folder):
  launch = Launch(folder, processes=2, **ENDLESS, grain_worker_count=1)
  launch.wait_for(r"^\[0\] step +9/")
  processes = []
  for rank in range(2):
    process = launch.process_id(rank)
    processes.append(process)
    processes += children(process)
  assert len(processes) >= 4
  launch.process.kill()
  launch.process.wait()
  deadline = time.monotonic() + 30
  while any(is_running(process) for process in processes) and time.monotonic() < deadline:
    time.sleep(0.1)
  assert not [process for process in processes if is_running(process)]


def is_running(process):
  with contextlib.suppress(OSError):
    return not re.search(r"State:\s+Z", Path(f"/proc/{process}/status").read_text())
  return False


@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_cannot_write_ends_all_and_earlier_checkpoints_are_intact(folder, rank):
  """A limit on the file size of one host simulates a full disk."""

  def saved():
    names = [path.name for path in folder.glob("run/checkpoints/*")]
    return [int(name) for name in names if name.isdigit()]

  launch = Launch(folder, processes=2, **ENDLESS | {"log_period": 10**6})
  launch.wait_until(lambda: len(saved()) > 1)
  resource.prlimit(launch.process_id(rank), resource.RLIMIT_FSIZE, (100, 100))
  assert launch.wait() == 1
  said = rf"^\[{rank}\] maxlite.train: no checkpoint can be written to .*File too large"
  assert re.search(said, launch.output, re.M)
  last = max(saved())
  output = run(folder, processes=2, **ENDLESS | {"steps": last + 9})
  assert f"resuming from the checkpoint of step {last}" in output


class Apart:
  """Two processes with separate folders, as on hosts without a shared file system."""

  def __init__(self, folder, **keys):
    with subprocess.Popen(["true"]) as _:
      port = 20_000 + os.getpid() % 20_000
    all_keys = KEYS | keys_in(Path("runs"), **keys)
    command = [sys.executable, "-m", "maxlite.train", *arguments_of(all_keys), "num_processes=2"]
    command += [f"coordinator_address=127.0.0.1:{port}", f"jax_cache_dir={folder / 'cache'}"]
    self.processes = []
    for rank in range(2):
      process = subprocess.Popen(
        [*command, f"process_id={rank}"],
        cwd=folder / str(rank),
        env=ENVIRONMENT,
        stderr=subprocess.PIPE,
        text=True,
      )
      self.processes.append(process)

  def ends(self):
    """(exit code, last line on stderr) of each."""
    ended = []
    for process in self.processes:
      _, errors = process.communicate(timeout=300)
      lines = [line for line in errors.splitlines() if "Gloo" not in line]
      ended.append((process.returncode, lines[-1]))
    return ended


@pytest.fixture
def apart(uninterrupted, folder):
  """Two folders, each with a copy of the run."""
  for rank in range(2):
    shutil.copytree(uninterrupted[0], folder / str(rank) / "runs")
  return folder


def test_a_checkpoint_that_one_host_cannot_read_ends_all_with_one_line(apart):
  for data in (apart / "1/runs/run/checkpoints").rglob("manifest.ocdbt"):
    data.unlink()
  for code, line in Apart(apart, **SHORT | {"steps": 50}).ends():
    assert code in (2, EXIT_PEER_LOST)
    assert re.search("all checkpoints in .* are damaged", line)


def test_hosts_without_a_shared_folder_end_with_an_error(apart):
  shutil.rmtree(apart / "1/runs/run/checkpoints")
  for code, line in Apart(apart, **SHORT | {"steps": 50}).ends():
    assert code in (2, EXIT_PEER_LOST)
    assert "base_output_directory must be a folder that all hosts share" in line


def test_a_path_that_looks_like_a_pattern_is_an_error(folder):
  for rank in range(2):
    (folder / str(rank)).mkdir(parents=True)
  for code, line in Apart(folder, **SHORT | {"run_name": "run[1]"}).ends():
    assert code in (2, EXIT_PEER_LOST)
    assert "to a path that contains one of *?[: choose another" in line


def test_an_error_on_one_host_is_reported_on_all(folder):
  for rank, text in ((0, "to be or not to be\n" * 99), (1, "")):
    (folder / str(rank)).mkdir(parents=True)
    (folder / str(rank) / "text.txt").write_text(text)
  data = {"dataset_type": "text", "dataset_path": "text.txt", "eval_split": "tail"}
  for code, line in Apart(folder, **SHORT | data).ends():
    assert code in (2, EXIT_PEER_LOST)
    assert "text.txt" in line


COUNT = """
import collections, sys
import jax
found = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: found.update([event.split("/")[-1]]))
from maxlite.train import main
code = main()
print(code, found["compile_requests_use_cache"], found["cache_hits"])
"""


def test_a_restart_compiles_nothing(folder):
  """On one device: XLA:CPU hangs in loaded programs of several (kernels/xla_cpu.py)."""

  def count(steps):
    """(compilations, hits of the cache) of a start with this number of steps."""
    keys = KEYS | keys_in(folder, **SHORT) | {"steps": steps}
    command = [sys.executable, "-c", COUNT, *arguments_of(keys)]
    done = subprocess.run(command, check=True, env=ENVIRONMENT, capture_output=True, text=True)
    compilations, hits = done.stdout.split()[-2:]
    return int(compilations), int(hits)

  compilations, hits = count(steps=4)
  assert compilations > 10
  assert hits == 0
  compilations, hits = count(steps=8)
  assert compilations == hits > 10


def test_alternately_killed_ranks_change_no_result():
  keys = KEYS | LIGHT | {"steps": 300, "checkpoint_period": 20, "jax_cache_dir": ""}
  command = [sys.executable, "tools/inspect/kill_hosts.py", "--kills", "3", "--devices", "1"]
  command += arguments_of(keys)
  environment = os.environ | {"PYTHONPATH": str(ROOT)}
  done = subprocess.run(
    command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "killed 3 times, 3 restarts" in done.stdout
