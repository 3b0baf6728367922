"""Early stopping, and the checkpoint with the lowest held-out loss."""

import contextlib
import math
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_run import Output, checkpoint_steps, keys_in, logged, start

import maxlite
from maxlite.metrics.best_loss import BestLoss
from maxlite.runs.evaluate_run import run_evaluation
from maxlite.runs.saved_run import config_of_run

LOSSES = st.lists(st.none() | st.sampled_from([math.nan, 1.0, 2.0, 3.0, 4.0]), max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(losses=LOSSES, patience=st.integers(1, 4), cut=st.integers(0, 12))
def test_the_best_loss_and_the_patience_follow_from_the_rows(losses, patience, cut):
  rows = [{"step": n, "eval_loss": loss} for n, loss in enumerate(losses, start=1)]
  finite = [math.inf if loss is None or math.isnan(loss) else loss for loss in losses]
  best = BestLoss(patience, rows)
  assert best.loss == min(finite, default=math.inf)
  assert best.step == (finite.index(best.loss) + 1 if best.loss < math.inf else 0)
  assert bool(best.stop_reason) == (len(rows) - best.step >= patience)
  resumed = BestLoss(patience, rows[:cut])
  for row in rows[cut:]:
    resumed.add({"step": row["step"], "loss": 0.0})  # not evaluated
    resumed.add(row)
  assert (resumed.step, resumed.stop_reason) == (best.step, best.stop_reason)


def test_the_moving_average_counts_if_there_is_one():
  rows = [{"step": n, "eval_loss": -n, "eval_ema_loss": n} for n in (1, 2)]
  assert BestLoss(rows=rows).step == 1


# Nothing is learned, so the first evaluation remains the best.
STALLED = {
  "decoder_block": "llama",
  "base_num_decoder_layers": 1,
  "gradient_accumulation_steps": 1,
  "learning_rate": 0,
  "eval_interval": 1,
  "early_stopping_patience": 3,
  "keep_best_checkpoint": True,
  "max_num_checkpoints_to_keep": 1,
  "checkpoint_period": 3,
}


@pytest.fixture(scope="module")
def stopped(runs_folder):
  """(folder, output) of a run that stopped early."""
  folder = runs_folder / "stopped_early"
  code, output = start(folder, **STALLED)
  assert code == 0
  return folder, output


def test_a_run_stops_early_and_keeps_the_best_checkpoint(stopped):
  folder, output = stopped
  loss = logged(folder)[0]["eval_ema_loss"]
  line = (
    f"early stopping: the held-out loss {loss:.4f} of step 1 was not lowered in 3 evaluations; "
  )
  assert line + "left after step 4 of 8, with a checkpoint" in output
  assert [row["step"] for row in logged(folder)] == [1, 2, 3, 4]
  assert checkpoint_steps(folder) == [1, 4]


def test_a_run_that_stopped_early_is_not_resumed(stopped):
  code, output = start(stopped[0], **STALLED)
  assert code == 0
  assert "is at step 4 of 8, early stopping: " in output
  assert "nothing to do. Give it a larger early_stopping_patience" in output


@pytest.mark.slow
def test_an_interrupted_run_stops_early_at_the_same_step(stopped, folder):
  for at in (1, 2):  # stops after the next step, with a checkpoint
    assert start(folder, Output(at), **STALLED)[0] != 0
  assert start(folder, **STALLED)[0] == 0
  assert logged(folder) == logged(stopped[0])
  assert checkpoint_steps(folder) == checkpoint_steps(stopped[0])


def evaluate(folder, which):
  names = ("run_name", "base_output_directory", "jax_cache_dir")
  argv = [f"{name}={keys_in(folder)[name]}" for name in names] + [f"load_checkpoint={which}"]
  output = Output()
  with contextlib.redirect_stdout(output):
    assert run_evaluation(config_of_run(argv)) == 0
  return output.getvalue()


def test_commands_and_python_load_the_best_checkpoint(stopped):
  folder = stopped[0]
  assert "run step 1  eval_loss" in evaluate(folder, "best")
  best = maxlite.open_run(folder / "run", load_checkpoint="best")
  assert (best.step, maxlite.open_run(folder / "run").step) == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("damage", "message"),
  [
    ("best", r"checkpoints/1 is damaged: .*; write load_checkpoint=latest"),
    ("missing", r"no checkpoint of the lowest held-out loss \(step 1\): train with keep_best"),
    ("metrics", r"no checkpoint of the lowest held-out loss \(step 0\): train with"),
  ],
)
def test_another_checkpoint_never_replaces_the_best(stopped, folder, damage, message):
  shutil.copytree(stopped[0], folder)
  checkpoint = folder / "run/checkpoints/1"
  if damage == "best":
    (checkpoint / "state/manifest.ocdbt").write_bytes(b"")
  elif damage == "missing":
    shutil.rmtree(checkpoint)
  else:
    (folder / "run/metrics.jsonl").unlink()
  with pytest.raises(maxlite.UserError, match=message):
    maxlite.open_run(folder / "run", load_checkpoint="best")


def test_held_out_data_are_required(folder, tmp_path):
  (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
  keys = {"dataset_type": "text", "dataset_path": tmp_path / "text.txt", "eval_fraction": 0}
  with pytest.raises(maxlite.UserError, match="keep_best_checkpoint needs held-out data"):
    maxlite.train(**keys_in(folder, keep_best_checkpoint=True), **keys)
