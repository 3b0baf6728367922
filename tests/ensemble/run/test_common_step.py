"""Members that trained together resume from a step that all of them have."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.ensemble_runs import TINY, checksums, rows_of
from support.host_runs import arguments_of
from support.tiny import KEYS
from support.tiny_run import keys_in

from maxlite.checkpoint.folders import is_complete
from maxlite.ensemble.members.common_step import (
  TOGETHER,
  Segment,
  common_step,
  group_by_segment,
  read_segment,
  write_segment,
)
from maxlite.errors import UserError


@pytest.mark.parametrize(
  ("saved", "first_step", "expected"),
  [
    ([[20, 40, 60], [20, 40, 60]], 0, 60),
    ([[20, 40, 60], [20, 40]], 0, 40),  # killed while step 60 was saved
    ([[40, 60], [20, 40]], 0, 40),  # the same, with two checkpoints kept
    ([[20, 40, 60], [20, 40], [20, 60]], 0, 20),  # and a lost one
    ([[20], []], 0, 0),  # killed while the first step was saved
    ([[], []], 0, 0),
    ([[20, 40, 60], []], 0, None),  # the folder of its checkpoints was moved away
    ([[60], [40]], 0, None),
    ([[100, 120], [100]], 100, 100),  # the second joined at step 100
    ([[100, 120], [80]], 100, None),  # it lost the checkpoint with which it joined
  ],
)
def test_the_latest_step_that_all_have(saved, first_step, expected):
  assert common_step(saved, first_step) == expected


def test_members_that_trained_together_are_grouped(tmp_path):
  """A member that halving stopped, and one that catches up alone, hold nobody back."""
  together = Segment(40, ("a", "b"))
  for name in together.members:
    write_segment(tmp_path / name, together)
  write_segment(tmp_path / "stopped", Segment(0, ("a", "b", "stopped")))
  write_segment(tmp_path / "catching_up", Segment(0, ("catching_up",)))
  names = ["a", "new", "stopped", "catching_up", "b", "other"]
  segments = {name: read_segment(tmp_path / name) for name in names}
  assert list(group_by_segment(segments)) == [
    (40, ["a", "b"]),
    (0, ["new"]),
    (0, ["stopped"]),
    (0, ["catching_up"]),
    (0, ["other"]),
  ]


@pytest.mark.parametrize("text", ["{", "[]", '{"first_step": "1", "members": []}'])
def test_a_damaged_file_is_named(tmp_path, text):
  (tmp_path / TOGETHER).write_text(text)
  with pytest.raises(UserError, match=rf"{TOGETHER} .*: remove it"):
    read_segment(tmp_path)


NAMES = [f"m{n}" for n in range(6)]
STEPS = 12


def command(folder: Path) -> list[str]:
  members = ", ".join(
    f"{{name: {name}, learning_rate: {n + 1}e-3}}" for n, name in enumerate(NAMES)
  )
  keys = KEYS | keys_in(folder, **TINY) | {"run_name": "ens", "steps": STEPS}
  keys |= {"checkpoint_period": 1, "max_num_checkpoints_to_keep": 1, "eval_interval": STEPS}
  keys |= {"ensemble_strategy": "stacked", "members": f"[{members}]"}
  keys |= {"ici_ensemble_parallelism": 1, "per_device_batch_size": 8}
  return [sys.executable, "-m", "maxlite.train", *arguments_of(keys)]


def saved_steps(folder: Path) -> list[set[int]]:
  steps = []
  for name in NAMES:
    checkpoints = folder / "ens/members" / name / "checkpoints"
    found = list(checkpoints.iterdir()) if checkpoints.exists() else []
    steps.append({int(path.name) for path in found if path.name.isdigit() and is_complete(path)})
  return steps


@pytest.mark.slow
def test_a_stack_killed_during_its_saves_is_resumed_bit_for_bit(tmp_path):
  """Killed when some members have a checkpoint of the step from 3 on and some have not."""
  environment = os.environ | {"XLA_FLAGS": ""}
  whole = tmp_path / "whole"
  subprocess.run(command(whole), env=environment, check=True, capture_output=True)
  folder = tmp_path / "killed"
  num_kills = 0
  for first in (3, 7):
    process = subprocess.Popen(command(folder), env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None:
      latest = [max(steps, default=0) for steps in saved_steps(folder)]
      if max(latest) >= first and len(set(latest)) > 1:
        process.send_signal(signal.SIGKILL)
        num_kills += 1
        break
      time.sleep(0.001)
    process.wait()
  assert num_kills
  again = subprocess.run(
    command(folder), env=environment, check=True, capture_output=True, text=True
  )
  assert again.stdout.count("resuming from the checkpoints of step") == 1
  for name in NAMES:
    rows = {row["step"]: row for row in rows_of(folder, name)}
    expected = {row["step"]: row for row in rows_of(whole, name)}
    assert rows == expected
    assert checksums(folder, name, STEPS) == checksums(whole, name, STEPS)
