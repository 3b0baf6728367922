"""A run goes on from its hosts' own checkpoints as if nothing had happened.

With real processes, of which one is killed, it takes minutes.
"""

import os
import shutil
import signal

import pytest
from host_runs import Launch, run
from test_many_hosts import LIGHT
from tiny_run import (
  STEPS,
  Output,
  assert_as_if_nothing_had_happened,
  checkpoint_steps,
  logged,
  parameter_hash,
  start,
)


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


def test_a_run_made_anew_is_not_that_which_was_deleted(folder):
  keys = LIGHT | {"local_checkpoint_directory": folder / "local", "local_checkpoint_period": 1}
  keys |= {"checkpoint_period": 6, "steps": 7}
  with pytest.raises(CrashError):
    start(folder, Crashing(at=5), **keys)
  shutil.rmtree(folder / "run")
  assert "going on" not in start(folder, **keys)[1]


# ---- many processes ----

TWO = ("--processes", 2, "--devices", 1)
LONG = LIGHT | {"steps": 60, "learning_rate_schedule_steps": 60, "eval_period": 0}
LONG |= {"checkpoint_period": 40, "global_batch_size": 16, "max_num_checkpoints_to_keep": 40}
LOCAL = {"local_checkpoint_period": 4}
BY_DATA = {"ici_fsdp_parallelism": 1, "ici_data_parallelism": -1}


@pytest.fixture(scope="module")
def in_peace(runs_folder):
  """By the keys of its mesh, (rows, hash of the parameters) of a run to which nothing happens."""
  found = {}

  def rows_and_hash(keys):
    name = "_".join(["local_peace", *keys])
    if name not in found:
      output = run(runs_folder / name, *TWO, **LONG, **keys)
      found[name] = logged(runs_folder / name), hash_in(output)
    return found[name]

  return rows_and_hash


def hash_in(output):
  return parameter_hash([line for line in output.splitlines() if "parameters" in line][-1])


def killed_at(folder, step, *options, rank=1, **keys):
  """Output of a start that ends by kill -9 of a process after the line of `step`."""
  launch = Launch(folder, *options, **keys)
  launch.wait_for(rf"^\[0\] step +{step}/")
  os.kill(launch.process_id(rank), signal.SIGKILL)
  assert launch.wait() != 0
  return launch.output


def local_files(folder):
  """By step, newest first."""
  found = {}
  for path in (folder / "local").rglob("*.safetensors"):
    found.setdefault(int(path.name.split("-")[0]), []).append(path)
  return dict(sorted(found.items(), reverse=True))
