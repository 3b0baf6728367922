"""Phases with separate data on two hosts equal one host, also after a kill."""

import json
import os
import signal

import pytest
from support.host_runs import LAST_BITS, LIGHT, Launch, largest_difference, run
from support.tiny_run import logged, parameter_hash

pytestmark = pytest.mark.slow


def keys_of(folder):
  """One phase trains all; one reads a separate file in smaller batches; one ends on a condition."""
  path = folder / "own.jsonl"
  lines = [json.dumps({"text": f"{n} is {n}"}) for n in range(99)]
  path.write_text("\n".join(lines) + "\n")
  phases = [
    "{name: fit, train: [layers_0/.*], steps: 3}",
    (
      f"{{name: own, train: [unembed/.*], steps: 2, dataset_type: jsonl, dataset_path: {path}, "
      "global_batch_size: 8}"
    ),
    "{name: free, train: [.*], until: {metric: loss, max_steps: 4, below: 0.1}}",
  ]
  return LIGHT | {
    "steps": 40,
    "learning_rate_schedule_steps": 40,
    "eval_interval": 20,
    "checkpoint_period": 8,
    "global_batch_size": 16,
    "phases": f"[{', '.join(phases)}]",
  }


def last_hash(output):
  reports = [line for line in output.splitlines() if "parameters " in line]
  return parameter_hash(reports[-1])


def test_phases_with_separate_streams_are_the_same_on_two_hosts(runs_folder):
  keys = keys_of(runs_folder)
  one_host = runs_folder / "phases_one_host"
  two_hosts = runs_folder / "phases_two_hosts"
  killed = runs_folder / "phases_killed"
  run(one_host, processes=1, devices=2, **keys)
  output = run(two_hosts, processes=2, devices=1, **keys)
  assert "data of own: train" in output
  difference = largest_difference(two_hosts, one_host)
  print(json.dumps({"two hosts against one": difference}))
  assert difference < LAST_BITS
  launch = Launch(killed, processes=2, devices=1, restarts=2, **keys)
  for rank, step in ((0, 15), (1, 30)):
    launch.wait_for(rf"^\[0\] step +{step}/")
    os.kill(launch.process_id(rank), signal.SIGKILL)
  assert launch.wait() == 0, launch.output
  assert "resuming from the checkpoint of step" in launch.output
  assert logged(killed) == logged(two_hosts)
  assert last_hash(launch.output) == last_hash(output)
