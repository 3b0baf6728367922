"""Ensembles from the command line: every member gets the results of its solo run."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.ensemble_runs import (
  ALIKE,
  FAST,
  MOE,
  ONE_EACH,
  SIZES,
  STEPS,
  TINY,
  TOLERANCE,
  checksums,
  config,
  entries_of,
  rows_of,
  start,
)
from support.host_runs import arguments_of
from support.slow_cases import slow
from support.tiny import KEYS, compilations, traces
from support.tiny_run import Output

from maxlite.config import load_config
from maxlite.config.members import members_of
from maxlite.distributed.initialize import SeparateProcesses
from maxlite.ensemble.__main__ import main
from maxlite.ensemble.run import finalize
from maxlite.ensemble.run.ensemble_run import train_ensemble
from maxlite.errors import UserError
from maxlite.metrics.writers import read_rows
from maxlite.registry import ENSEMBLE_STRATEGIES
from maxlite.runs.run import run_training
from maxlite.storage.mirror import open_mirror
from maxlite.storage.object_store import download, list_files

WIDE = "{name: wide, base_emb_dim: 24, init_weights_seed: 2}"
MEMBERS = f"[{FAST}, {SIZES}]"
# Members and mesh for each strategy.
CASES = {
  "stacked": (f"[{ALIKE}]", {"ici_ensemble_parallelism": 2}),
  "fused": (MEMBERS, ONE_EACH),
  "submesh": (f"[{ALIKE}, {MOE}]", {}),
}
FUSED = {"ensemble_strategy": "fused", **ONE_EACH}
DRAW = {name: vars(finalize)[name] for name in vars(finalize) if name.startswith("draw_")}


@pytest.fixture(scope="module")
def alone(root):
  """A function from a member's name to the rows of its solo run, which the first call runs."""
  folder = root / "alone"
  cfg = config(folder, f"[{ALIKE}, {SIZES}, {MOE}]")
  members = {member.name: member for member in members_of(cfg)}

  def rows(name: str) -> list[dict]:
    if not (folder / "ens/members" / name).exists():
      with contextlib.redirect_stdout(Output()):
        assert run_training(members[name].config) == 0
    return rows_of(folder, name)

  return rows


@pytest.fixture(scope="module")
def fused(root):
  """(folder, output, names of the compiled programs and traced functions) of an ensemble."""
  folder = root / "fused"
  with compilations() as compiled, traces() as traced:
    code, output = start(folder, MEMBERS, **FUSED)
  assert code == 0
  return folder, output, compiled, traced


def test_every_strategy_has_a_case():
  assert set(CASES) == set(ENSEMBLE_STRATEGIES) - {"processes", "switched", "padded"}


@pytest.mark.parametrize(
  ("strategy", "other", "message"),
  [
    ("switched", SIZES, "members from configs have a mesh of their devices, .*; use submesh"),
    ("padded", SIZES, "padding takes members with the same parameters and optimizer function"),
    slow("padded", WIDE, "padding changes the loss of fast by .*: use fused"),  # means in its norms
  ],
)
def test_strategies_that_do_not_take_the_members_are_refused_in_one_line(
  root, strategy, other, message
):
  with pytest.raises(UserError, match=message):
    train_ensemble(config(root / strategy, f"[{FAST}, {other}]", ensemble_strategy=strategy))


# One of the stacked members is enough; test_strategies.py tests the bits of members that are not.
PROBED = {
  "stacked": ("slow", "fast"),
  "fused": ("fast",),
  "submesh": ("fast", "moe"),
}


# The others are slow to compile; test_strategies.py tests all of them.
@pytest.mark.slow
@pytest.mark.parametrize("strategy", CASES)
def test_members_equal_their_solo_runs(root, alone, fused, strategy):
  members, mesh = CASES[strategy]
  folder = root / strategy
  if strategy != "fused":
    code, _ = start(folder, members, ensemble_strategy=strategy, **mesh)
    assert code == 0
  for name in PROBED[strategy]:
    rows = rows_of(folder, name)
    expected_rows = alone(name)
    assert [row["step"] for row in rows] == [row["step"] for row in expected_rows]
    for row, expected in zip(rows, expected_rows, strict=True):
      assert row.keys() == expected.keys()
      for key in ("loss", "eval_loss", "grad_norm", "learning_rate"):
        if key in row:
          np.testing.assert_allclose(row[key], expected[key], rtol=TOLERANCE, err_msg=key)


def start_separately(folder: Path, members: str, process: int, count: int = 2, **keys: object):
  """One process of several; the others are at the same point and have the same exit code."""
  peers = SeparateProcesses(process, count, lambda value: [value] * count)
  keys = {"ensemble_strategy": "submesh", "per_device_batch_size": 1} | keys  # of 16 devices
  cfg = config(folder, members, **keys)
  output = Output()
  with contextlib.redirect_stdout(output):
    code = train_ensemble(cfg, peers=peers)
  return code, output.getvalue()


@pytest.mark.slow
def test_separate_processes_train_their_own_members(root, alone):
  """One after the other; the last one is process 0, which writes the leaderboard."""
  folder = root / "separate"
  leaderboard = folder / "ens/leaderboard.md"
  code, _ = start_separately(folder, MEMBERS, 1)
  assert code == 0
  assert rows_of(folder, "fast") == alone("fast")
  assert not (folder / "ens/members/deep/checkpoints").exists()
  assert not leaderboard.exists()
  code, _ = start_separately(folder, MEMBERS, 0)
  assert code == 0
  assert [row["step"] for row in rows_of(folder, "deep")] == list(range(1, STEPS + 1))
  assert "greedy selection" in leaderboard.read_text()
  _, output = start_separately(folder, MEMBERS, 0)
  assert "nothing to do" in output


def test_separate_processes_are_refused_in_one_line(root):
  with pytest.raises(UserError, match="2 members are too few for 3 processes; write"):
    start_separately(root / "refused", MEMBERS, 0, 3)
  keys = {"asha_reduction_factor": 2, "asha_min_steps": 2}
  with pytest.raises(UserError, match="halving would compare members of all hosts; write"):
    start_separately(root / "refused", MEMBERS, 0, **keys)


def test_the_step_is_traced_and_compiled_once(fused):
  _, _, compiled, traced = fused
  assert compiled.count("jit(_step)") == 1
  assert traced.count("_step") == 1


def test_output_of_a_finished_ensemble(fused, monkeypatch):
  folder, output, *_ = fused
  directory = folder / "ens"
  entries = entries_of(folder)
  assert {entry["name"] for entry in entries} == {"fast", "deep"}
  losses = [entry["best_loss"] for entry in entries]
  assert losses == sorted(losses)
  assert all(entry["status"] == "finished" for entry in entries)
  plots = ("learning_curves.png", "parallel_coordinates.png", "calibration.png")
  assert all((directory / name).exists() for name in plots)
  assert "strategy fused" in output
  assert "greedy selection" in output
  _, again = start(folder, MEMBERS, **FUSED)
  assert "nothing to do" in again
  board = directory / "leaderboard.md"
  before = board.read_text()
  board.unlink()  # as if the run had been interrupted before
  with monkeypatch.context() as patch:
    for name, draw in DRAW.items():
      patch.setattr(finalize, name, draw)
    code, output = start(folder, MEMBERS, **FUSED)
  assert code == 0
  assert all((directory / name).stat().st_size > 10_000 for name in plots)
  assert "greedy selection" in output
  assert board.read_text() == before


def stop_after(folder, step):
  """Stop the ensemble after `step`, which is in progress while the row before is printed."""
  code, output = start(folder, MEMBERS, Output(at=step - 1, number=signal.SIGTERM), **FUSED)
  assert code == 128 + signal.SIGTERM
  assert "stopped by SIGTERM" in output


def test_resuming_an_interrupted_ensemble_is_bitwise_exact(root, fused):
  whole, *_ = fused
  folder = root / "interrupted"
  stop_after(folder, 2)
  code, output = start(folder, MEMBERS, **FUSED)
  assert code == 0
  assert "resuming from the checkpoints of step 2: fast, deep" in output
  for name in ("fast", "deep"):
    assert rows_of(folder, name) == rows_of(whole, name)
    assert checksums(folder, name) == checksums(whole, name)


@pytest.mark.slow
def test_an_ensemble_on_s3_is_resumed_and_equals_a_local_one(root, fused, bucket):
  keys = FUSED | {"base_output_directory": bucket}
  code, _ = start(root, MEMBERS, Output(at=1, number=signal.SIGTERM), **keys)
  assert code == 128 + signal.SIGTERM
  open_mirror.cache_clear()  # what a new process sees
  code, output = start(root, MEMBERS, **keys)
  assert code == 0
  assert f"{bucket}/ens: members.jsonl, " in output
  assert output.endswith(f"run folders of the members in {bucket}/ens/members\n")
  copy = root / "copy_of_s3"
  for file in list_files(f"{bucket}/ens"):
    download(file.uri, copy / file.uri.removeprefix(f"{bucket}/"))
  local, *_ = fused
  for name in ("fast", "deep"):
    assert rows_of(copy, name) == rows_of(local, name)
    assert checksums(copy, name) == checksums(local, name)
  for file in ("members.jsonl", "leaderboard.md"):
    assert (copy / "ens" / file).stat().st_size


@pytest.mark.slow
def test_members_go_back_to_a_step_that_all_have(root, fused):
  whole, *_ = fused
  folder = root / "behind"
  stop_after(folder, STEPS)
  checkpoints = folder / "ens/members/deep/checkpoints"
  last_step = max(int(path.name) for path in checkpoints.iterdir())
  shutil.rmtree(checkpoints / str(last_step))
  code, _ = start(folder, MEMBERS, **FUSED)
  assert code == 0
  for name in ("fast", "deep"):
    assert rows_of(folder, name) == rows_of(whole, name)
    assert checksums(folder, name) == checksums(whole, name)


def losses_of(folder, name):
  return [row["loss"] for row in rows_of(folder, name)]


@pytest.mark.slow
def test_members_can_be_added_and_removed(root, fused):
  whole, *_ = fused
  folder = root / "changed"
  code, _ = start(folder, f"[{ALIKE}]", steps=2, **FUSED)
  assert code == 0
  code, output = start(folder, MEMBERS, **FUSED)
  assert code == 0
  assert "since the last start: steps=4 (was 2)" in output
  assert output.count("since the last start") == 1
  for name in ("fast", "deep"):
    expected = losses_of(whole, name)
    np.testing.assert_allclose(losses_of(folder, name), expected, rtol=TOLERANCE)
  assert rows_of(folder, "slow")[-1]["step"] == 2


@pytest.mark.slow
def test_an_exported_member_is_a_solo_run(root, fused, capsys):
  folder, *_ = fused
  ensemble = str(folder / "ens")
  assert main(["export", ensemble, "member=fast", "run_name=mine"]) == 0
  exported = folder / "mine"
  arguments = [str(exported / "config.yml"), f"steps={STEPS + 1}"]
  cfg = load_config(arguments, needs_data=False)
  assert cfg.optimizer.learning_rate == 1e-2
  assert cfg.run.init_weights_seed == 1
  assert cfg.mesh.ici_ensemble_parallelism == 1
  assert cfg.mesh.ici_fsdp_parallelism == -1
  with contextlib.redirect_stdout(Output()):
    assert run_training(cfg) == 0
  rows = read_rows(exported / "metrics.jsonl")
  assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
  assert main(["export", ensemble, "member=deep", "run_name=deep"]) == 0
  model = load_config([str(folder / "deep/config.yml")], needs_data=False).model
  assert model.base_num_decoder_layers == 2
  assert model.base_emb_dim == 24
  mistakes = {
    "did you mean fast?": ["export", ensemble, "member=fas"],
    "exists": ["export", ensemble, "member=fast", "run_name=mine"],
    "not an ensemble": ["export", str(exported), "member=fast"],
    "usage": ["exprot"],
  }
  for message, wrong in mistakes.items():
    with pytest.raises(SystemExit, match="2"):
      main(wrong)
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_diverging_member_is_frozen_and_does_not_affect_the_others(root):
  folder = root / "diverging"
  members = f"[{ALIKE}, {{name: wild, learning_rate: 1e30}}]"
  keys = FUSED | {"max_skipped_steps": 1, "warmup_steps_fraction": 0}
  code, output = start(folder, members, **keys)
  assert code == 0
  assert "wild diverged by step" in output
  entries = entries_of(folder)
  (wild,) = (entry for entry in entries if entry["name"] == "wild")
  assert wild["status"].startswith("diverged")
  calm = root / "calm"
  code, _ = start(calm, f"[{ALIKE}, {{name: mild, learning_rate: 1e-4}}]", **keys)
  assert code == 0
  for name in ("slow", "fast"):
    assert checksums(folder, name) == checksums(calm, name)


@pytest.mark.slow
def test_halving_stops_all_but_the_best_members(root, fused):
  folder = root / "halving"
  keys = FUSED | {"asha_reduction_factor": 2, "asha_min_steps": 2}
  code, output = start(folder, MEMBERS, **keys)
  assert code == 0
  whole, *_ = fused
  at_rung = {name: rows_of(whole, name)[1]["eval_loss"] for name in ("fast", "deep")}
  best, worst = sorted(at_rung, key=at_rung.get)
  assert rows_of(folder, best)[-1]["step"] == STEPS
  assert rows_of(folder, worst)[-1]["step"] == 2
  assert f"{worst} is stopped at step 2 by halving" in output
  assert f"{best} is stopped" not in output
  _, output = start(folder, MEMBERS, **keys)
  assert "nothing to do" in output


@pytest.mark.slow
@pytest.mark.parametrize("data", ["independent", "bootstrap"])
def test_members_may_read_separate_batches(root, data, capsys):
  folder = root / data
  keys = {"ensemble_strategy": "stacked", "ensemble_data": data, **ONE_EACH}
  code, _ = start(folder, f"[{ALIKE}]", **keys)
  assert code == 0
  solo = root / f"{data}_alone"
  for member in members_of(config(solo, f"[{ALIKE}]", ensemble_data=data)):
    with contextlib.redirect_stdout(Output()):
      assert run_training(member.config) == 0
    expected = losses_of(solo, member.name)
    np.testing.assert_allclose(losses_of(folder, member.name), expected, rtol=TOLERANCE)
  output = Output()
  with pytest.raises(SystemExit):  # the order of the data follows the position in the list
    start(folder, f"[{FAST}]", output, steps=STEPS + 1, **keys)
  assert "since the last start: fast data_shuffle_seed=0 (was 1)" in output.getvalue()
  errors = capsys.readouterr().err
  assert "member fast: the checkpoint was written with data_shuffle_seed=1" in errors


@pytest.mark.slow
def test_worker_processes_equal_one_process(root, tmp_path):
  words = arguments_of(KEYS | TINY)
  words += [f"base_output_directory={tmp_path}", "run_name=ens", "jax_cache_dir="]
  command = [sys.executable, "-m", "maxlite.train", *words, f"members=[{ALIKE}]"]
  env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "XLA_FLAGS": ""}

  def train(strategy):
    """(steps that are printed, losses by member)."""
    shutil.rmtree(tmp_path / "ens", ignore_errors=True)
    own_command = [*command, f"ensemble_strategy={strategy}"]
    result = subprocess.run(own_command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("step ")]
    steps = [line.partition(":")[0] for line in lines]
    return steps, {name: losses_of(tmp_path, name) for name in ("slow", "fast")}

  steps, losses = train("processes")
  expected_steps, expected_losses = train("fused")
  assert steps
  assert steps == expected_steps
  for name, expected in expected_losses.items():
    np.testing.assert_allclose(losses[name], expected, rtol=TOLERANCE)
