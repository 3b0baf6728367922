"""Phases with separate data on two hosts equal one host, also after a kill."""

import json
import os
import signal

import pytest
from host_runs import Launch, run
from test_many_hosts import LAST_BITS, LIGHT, largest_difference
from tiny_run import logged, parameter_hash

pytestmark = pytest.mark.slow


def keys_of(folder):
  """One phase trains all; one reads a separate file in smaller batches; one ends on a condition."""
  path = folder / "own.jsonl"
  path.write_text("".join(json.dumps({"text": f"{n} is {n}"}) + "\n" for n in range(99)))
  phases = [
    "{name: fit, train: [layers/.*], steps: 3}",
    (
      f"{{name: own, train: [unembed/.*], steps: 2, dataset_type: jsonl, dataset_path: {path}, "
      "global_batch_size: 8}"
    ),
    "{name: free, train: [.*], until: {metric: loss, max_steps: 4, below: 0.1}}",
  ]
  keys = {"steps": 40, "learning_rate_schedule_steps": 40, "eval_interval": 20}
  keys |= {"checkpoint_period": 8, "global_batch_size": 16}
  return LIGHT | keys | {"phases": f"[{', '.join(phases)}]"}


def last_hash(output):
  return parameter_hash([line for line in output.splitlines() if "parameters " in line][-1])


def test_phases_with_separate_streams_are_the_same_on_two_hosts(runs_folder):
  keys = keys_of(runs_folder)
  folders = [runs_folder / f"turns_{n}" for n in range(3)]
  run(folders[0], "--processes", 1, "--devices", 2, **keys)
  output = run(folders[1], "--processes", 2, "--devices", 1, **keys)
  assert "data of own: train" in output
  difference = largest_difference(folders[1], folders[0])
  print(json.dumps({"two hosts against one": difference}))
  assert difference < LAST_BITS
  launch = Launch(folders[2], "--processes", 2, "--devices", 1, "--restarts", 2, **keys)
  for rank, step in ((0, 15), (1, 30)):
    launch.wait_for(rf"^\[0\] step +{step}/")
    os.kill(launch.process_id(rank), signal.SIGKILL)
  assert launch.wait() == 0, launch.output
  assert "resuming from the checkpoint of step" in launch.output
  assert logged(folders[2]) == logged(folders[1])
  assert last_hash(launch.output) == last_hash(output)
