"""Members with different numbers of steps: each equals its solo run, bit for bit."""

import contextlib
import signal

import pytest
from support.ensemble_runs import FAST, checksums, config, rows_of, start
from support.tiny_run import Output

from maxlite.config.members import members_of
from maxlite.errors import UserError
from maxlite.runs.run import run_training

SHORT = "{name: short, steps: 2, learning_rate: 1e-2, init_weights_seed: 2}"
MEMBERS = f"[{FAST}, {SHORT}]"
# Each set has one member, which trains without vmap; the schedule is of the member's own length.
KEYS = {"learning_rate_schedule_steps": -1, "eval_interval": -1, "log_period": 3}


@pytest.fixture(scope="module")
def together(root):
  folder = root / "steps"
  code, output = start(folder, MEMBERS, **KEYS)
  assert code == 0
  return folder, output


def test_members_with_other_steps_equal_their_solo_runs(root, together):
  folder, output = together
  alone = root / "alone"
  steps = {"fast": [1, 3, 4], "short": [1, 2]}
  for member in members_of(config(alone, MEMBERS, **KEYS)):
    with contextlib.redirect_stdout(Output()):
      assert run_training(member.config) == 0
    rows = rows_of(folder, member.name)
    assert [row["step"] for row in rows] == steps[member.name]
    assert rows == rows_of(alone, member.name)
    assert "eval_loss" in rows[-1]
    last = rows[-1]["step"]
    assert checksums(folder, member.name, last) == checksums(alone, member.name, last)
  assert "step 2/2" in output
  assert "step 4/4" in output


def test_a_finished_ensemble_has_nothing_to_do(together):
  folder, _ = together
  _, output = start(folder, MEMBERS, **KEYS)
  assert "at steps 2 to 4 with all its members: nothing to do" in output


def test_an_interrupted_set_is_resumed(root, together):
  """The shorter set trains first; the other one is stopped and resumed."""
  whole, _ = together
  folder = root / "stopped"
  stopped = Output(at=3, number=signal.SIGTERM)
  code, _ = start(folder, MEMBERS, stopped, **KEYS)
  assert code == 128 + signal.SIGTERM
  assert rows_of(folder, "short") == rows_of(whole, "short")
  assert start(folder, MEMBERS, **KEYS)[0] == 0
  assert checksums(folder, "fast") == checksums(whole, "fast")


@pytest.mark.parametrize("key", ["asha_reduction_factor", "pbt_period"])
def test_members_that_are_compared_have_equal_steps(root, key):
  keys = KEYS | {key: 2, "asha_min_steps": 1}
  with pytest.raises(UserError, match=rf"members\[1\]: steps=2 with {key}=2, .*; write {key}=0"):
    config(root, MEMBERS, **keys)
