"""Runs: stopped, resumed, damaged, moved to another mesh, and invalid ones."""

import concurrent.futures
import os
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.tiny import config_of, mesh_keys
from support.tiny_run import (
  STEPS,
  Output,
  assert_equals_uninterrupted,
  checkpoint_steps,
  empty_plots,
  expert_loads,
  keys_in,
  logged,
  shared_programs,
  snapshot,
  start,
)

from maxlite.runs.run import train_model
from maxlite.training.callbacks import Callback


def test_every_step_is_logged_once_and_evaluations_when_due(finished):
  rows = logged(finished[0])
  assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
  assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8]
  assert checkpoint_steps(finished[0]) == [2, 4, 6, 8]
  assert rows[-1]["loss"] < rows[0]["loss"]


def test_a_run_trains_in_a_thread_which_may_handle_no_signals(copy):
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    code, output = pool.submit(start, copy, steps=STEPS + 1).result()
  assert code == 0
  assert f"resuming from the checkpoint of step {STEPS}" in output
  assert checkpoint_steps(copy)[-1] == STEPS + 1


class Terminating(Callback):
  """Sends SIGTERM to this process once a checkpoint is being written."""

  def on_checkpoint(self, step, state):
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_during_the_last_checkpoint_is_not_lost(copy):
  cfg = config_of(**keys_in(copy, steps=STEPS + 1))
  with shared_programs(), empty_plots():
    result = train_model(cfg, [Terminating()])[1]
  assert (result.step, result.exit_code) == (STEPS + 1, 128 + signal.SIGTERM)
  assert result.reason == "stopped by SIGTERM"


def test_expert_load_is_logged_and_plotted(finished):
  folder, output = finished
  rows = logged(folder)
  loads = expert_loads(folder)
  assert [load["step"] for load in loads] == [row["step"] for row in rows]
  for load, row in zip(loads, rows, strict=True):
    load_NE = np.array(load["expert_load"])
    np.testing.assert_array_equal(load_NE.sum(-1), load_NE.sum() / len(load_NE))
    assert row["expert_imbalance"] == np.max(load_NE.max(-1) / load_NE.mean(-1))
    assert row["expert_dropped"] == 0
  assert (folder / "run/expert_load.png").stat().st_size > 10_000
  assert "metrics.jsonl, curves.png, expert_load.png" in output


def test_resumed_run_equals_uninterrupted_run(finished, folder):
  assert start(folder, steps=4)[0] == 0
  code, output = start(folder)
  assert code == 0
  assert "since the last start: steps=8 (was 4)" in output
  assert "resuming from the checkpoint of step 4" in output
  configs = [(folder / "run" / name).read_text() for name in ("config.1.yml", "config.yml")]
  assert ["\nsteps: 4\n" in text for text in configs] == [True, False]
  assert ["\nsteps: 8\n" in text for text in configs] == [False, True]
  assert_equals_uninterrupted(folder, output, finished)


def test_tokens_are_counted_across_a_start_between_two_rows(finished, folder):
  for steps in (4, 8):
    assert start(folder, steps=steps, log_period=3)[0] == 0
  tokens = [row["num_tokens"] for row in logged(finished[0])]
  totals = {row["step"]: row["total_tokens"] for row in logged(folder)}
  assert totals == {step: sum(tokens[:step]) for step in totals}
  assert totals.keys() >= {5, 6, 8}


def test_checkpoints_by_time_are_saved_and_resumed_from(finished, folder):
  keys = {"checkpoint_period": 100, "checkpoint_period_minutes": 1e-9, "log_period": 3}
  assert start(folder, **keys)[0] == 0
  assert checkpoint_steps(folder) == [3, 6, 8]
  shutil.rmtree(folder / "run/checkpoints/8")
  code, output = start(folder)
  assert (code, "resuming from the checkpoint of step 6" in output) == (0, True)
  expected = logged(finished[0])
  assert logged(folder)[-2:] == expected[-2:]


def test_signals_stop_a_run_with_a_checkpoint_and_it_resumes(finished, folder):
  handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
  for number, at in ((signal.SIGTERM, 2), (signal.SIGINT, 5)):
    code, output = start(folder, Output(at, number))
    assert code == 128 + number
    assert f"stopped by {number.name}; left after step {at + 1} of 8, with a checkpoint" in output
    assert checkpoint_steps(folder)[-1] == at + 1
  assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
  code, output = start(folder)
  assert (code, "resuming from the checkpoint of step 6" in output) == (0, True)
  assert_equals_uninterrupted(folder, output, finished)


def test_crash_after_a_checkpoint_duplicates_and_loses_no_row(finished, copy):
  for step in (6, 8):
    shutil.rmtree(copy / f"run/checkpoints/{step}")
  code, output = start(copy)
  assert (code, "resuming from the checkpoint of step 4" in output) == (0, True)
  assert_equals_uninterrupted(copy, output, finished)


def test_damaged_checkpoint_is_reported_and_the_previous_one_used(finished, copy):
  index = copy / "run/checkpoints/8/state/manifest.ocdbt"
  index.write_bytes(index.read_bytes()[:-20])
  code, output = start(copy)
  assert (code, "resuming from the checkpoint of step 6" in output) == (0, True)
  assert "checkpoints/8 is damaged" in output
  assert_equals_uninterrupted(copy, output, finished)


@pytest.mark.slow
def test_resumes_on_another_mesh(finished, copy):
  for step in (6, 8):
    shutil.rmtree(copy / f"run/checkpoints/{step}")
  code, output = start(copy, replica_check_period=2, **mesh_keys("fsdp=2 tensor=2 data=2"))
  assert (code, "resuming from the checkpoint of step 4" in output) == (0, True)
  rows = logged(copy)
  expected_rows = logged(finished[0])
  assert rows[:4] == expected_rows[:4]
  assert rows != expected_rows
  for row, expected in zip(rows, expected_rows, strict=True):
    assert row.keys() == expected.keys()
    for name, value in expected.items():
      np.testing.assert_allclose(row[name], value, rtol=1e-5, err_msg=name)


def test_finished_run_changes_no_file(finished):
  folder, _ = finished
  before = snapshot(folder)
  code, output = start(folder)
  assert (code, "step 8 of 8: nothing to do" in output) == (0, True)
  assert snapshot(folder) == before


def test_another_architecture_is_an_error(finished, capsys):
  folder, _ = finished
  before = snapshot(folder)
  with pytest.raises(SystemExit, match="2"):
    start(folder, base_emb_dim=32, num_experts=8, learning_rate=1.0)
  (line,) = capsys.readouterr().err.splitlines()
  assert "was made with base_emb_dim=16 num_experts=4, this command says" in line
  assert "base_emb_dim=32 num_experts=8: choose another run_name" in line
  assert "learning_rate" not in line
  assert snapshot(folder) == before


def test_run_without_checkpoints_does_not_overwrite_a_run(finished, capsys):
  folder, _ = finished
  before = snapshot(folder)
  with pytest.raises(SystemExit, match="2"):
    start(folder, enable_checkpointing="false")
  (line,) = capsys.readouterr().err.splitlines()
  assert "enable_checkpointing=false would start anew and overwrite" in line
  assert snapshot(folder) == before


def test_two_processes_cannot_train_in_one_folder(finished, copy, capsys):
  before = snapshot(copy)
  hold = "import sys, time; from maxlite.checkpoint.run_folder import RunFolder as Folder; "
  hold += "Folder(sys.argv[1]).lock(); print(flush=True); time.sleep(600)"
  with subprocess.Popen(
    [sys.executable, "-c", hold, copy / "run"], stdout=subprocess.PIPE
  ) as other:
    other.stdout.readline()
    with pytest.raises(SystemExit, match="2"):
      start(copy, steps=STEPS + 1)
    other.kill()
  (line,) = capsys.readouterr().err.splitlines()
  assert f"run is in use by process {other.pid} on " in line
  assert snapshot(copy).keys() == before.keys()
  assert start(copy, steps=STEPS + 1)[0] == 0


def test_diverging_run_stops(folder):
  keys = {"decoder_block": "llama", "base_num_decoder_layers": 1, "ema_decay": 0}
  keys |= {"learning_rate": 1e30, "gradient_accumulation_steps": 1}
  code, output = start(folder, max_skipped_steps=3, **keys)
  assert code == 1
  assert "not finite in 3 steps in a row (max_skipped_steps): lower learning_rate" in output
  rows = logged(folder)
  in_a_row = [row["skipped_in_a_row"] for row in rows]
  assert in_a_row[-3:] == [1, 2, 3]
  assert rows[-1]["step"] < STEPS
  assert checkpoint_steps(folder)[-1] in (rows[-1]["step"], rows[-1]["step"] + 1)
  assert all(row["loss"] is None or np.isfinite(row["loss"]) for row in rows)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"per_device_batch_size": 0.3}, "8 devices = 2.4 rows do not divide by 8"),
    ({"global_batch_size": 12}, "12 rows do not divide by 8 (8 shards of the batch x gradient_"),
    (
      {"gradient_accumulation_steps": 3},
      "gradient_accumulation_steps=3); the nearest that does is per_device_batch_size=3 (24 rows)",
    ),
    (
      {"ici_fsdp_parallelism": 1, "ici_context_parallelism": -1, "max_target_length": 12},
      "max_target_length=12 does not divide by the 8 shards of the context axis: set it to 16",
    ),
    (
      {"ici_fsdp_parallelism": 2, "ici_data_parallelism": 3},
      "ici_data_parallelism=3 x ici_fsdp_parallelism=2 multiply to 6, but there are 8 devices",
    ),
    ({"base_emb_dim": 20}, "is not divisible by fsdp=8"),
    ({"sharding_tolerance": 0}, "of parameter bytes are unsharded on every device"),
  ],
  ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_invalid_configs_are_one_line_errors(folder, capsys, keys, message):
  with pytest.raises(SystemExit, match="2"):
    start(folder, **({"gradient_accumulation_steps": 1} | keys))
  (line,) = capsys.readouterr().err.splitlines()
  assert line.startswith("maxlite.train: ")
  assert message in line
  assert not folder.exists()
