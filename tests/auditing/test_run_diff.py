"""maxlite.diff: where two runs that should be equal differ first."""

import json
import sys

import ml_dtypes
import numpy as np
import pytest
from support.tiny_run import start

import maxlite
from maxlite.auditing.run_diff import _compare
from maxlite.diff import main
from maxlite.errors import UserError

pytestmark = pytest.mark.usefixtures("fast_programs")


def command(monkeypatch, *arguments):
  """The exit code of the command."""
  monkeypatch.setattr(sys, "argv", ["maxlite.diff", *map(str, arguments)])
  return main()


def test_a_run_equals_its_copy(finished, copy, monkeypatch, capsys):
  assert command(monkeypatch, finished[0] / "run", copy / "run") == 0
  assert "equal, bit for bit" in capsys.readouterr().out


def test_the_first_differing_step_parameter_and_its_cause_are_named(
  finished, folder, monkeypatch, capsys
):
  code, _ = start(folder, data_shuffle_seed=1)
  assert code == 0
  report = folder / "diff.json"
  assert command(monkeypatch, finished[0] / "run", folder / "run", f"json={report}") == 1
  printed = capsys.readouterr().out
  assert "DIFFERS: metrics, first at step 1" in printed
  assert "config: data_shuffle_seed=0 and 1" in printed
  assert "likely cause: the runs read other batches" in printed
  found = maxlite.diff(finished[0] / "run", folder / "run")
  assert found.state[0].step == 2  # the first checkpoint
  assert found.state[0].name == "params/embed/embedding"
  assert found.state[0].relative > 0
  assert json.loads(report.read_text())["metrics"][0]["name"] == "loss"


def test_checkpoints_of_two_steps_are_compared(finished):
  checkpoints = finished[0] / "run/checkpoints"
  found = maxlite.diff(checkpoints / "2", checkpoints / "4")
  assert not found.is_equal
  assert found.num_rows == 0
  assert maxlite.diff(checkpoints / "2", checkpoints / "2").is_equal


def test_a_version_that_differs_is_named(finished, copy):
  starts = copy / "run/starts.jsonl"
  row = json.loads(starts.read_text()) | {"jax": "0.1"}
  starts.write_text(json.dumps(row) + "\n")
  found = maxlite.diff(finished[0] / "run", copy / "run")
  assert found.versions.keys() == {"jax"}
  assert found.is_equal


def test_what_cannot_be_compared_is_an_error(finished, tmp_path):
  with pytest.raises(UserError, match="there is no run: give its folder"):
    maxlite.diff(finished[0] / "run", tmp_path)
  with pytest.raises(UserError, match=r"no checkpoint of step 99; there are \[2, 4, 6, 8\]"):
    maxlite.diff(finished[0] / "run", finished[0] / "run/checkpoints/99")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_neighbouring_numbers_differ_by_one_ulp(dtype):
  one = np.array([1, 0, 2], dtype)
  tiny = np.zeros(1, dtype)
  tiny.view(f"i{tiny.dtype.itemsize}")[:] = 1  # the smallest number above 0
  next_one = one.copy()
  next_one.view(f"i{one.dtype.itemsize}")[0] += 1
  assert _compare(1, "x", one, next_one).ulp == 1
  assert _compare(1, "x", one, next_one).num_elements == 1
  assert _compare(1, "x", -tiny, tiny).ulp == 2
