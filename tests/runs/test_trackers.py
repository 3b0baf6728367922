"""TensorBoard, Weights & Biases offline and the callback `completions`; export of the best step."""

import importlib.util
import json
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.tiny import compilations
from support.tiny_run import start

import maxlite
from maxlite import convert
from maxlite.inference.generation import Completer, CompletionsCallback
from maxlite.metrics.writers import Writers
from maxlite.training.callbacks import CallbackContext

HAS_WANDB = importlib.util.find_spec("wandb") is not None
KEYS = {
  "decoder_block": "llama",
  "base_num_decoder_layers": 1,
  "dataset_type": "text",
  "tokenizer_type": "byte",
  "steps": 4,
  "eval_interval": 1,
  "learning_rate": 1,  # too large: the last evaluation is not the best
  "warmup_steps_fraction": 0,
  "gradient_accumulation_steps": 1,
  "ema_decay": 0,
  "keep_best_checkpoint": True,
  "callbacks": "completions",
  "prompt": "to be",
  "max_new_tokens": 4,
  "decode_sampling_temperature": 0,
  "enable_tensorboard": True,
}


@pytest.fixture(scope="module")
def run(runs_folder):
  """The opened run; its last parameters are in `.params`."""
  folder = runs_folder / "tracked"
  text = runs_folder / "tracked.txt"
  text.write_text("to be or not to be\n" * 400)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("WANDB_MODE", "offline")
    keys = KEYS | ({"wandb_project_name": "tiny"} if HAS_WANDB else {})
    assert start(folder, plots=True, dataset_path=text, **keys)[0] == 0
  return maxlite.open_run(folder / "run")


def completions(run):
  return [json.loads(line) for line in (run.folder / "completions.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_completions_are_those_of_the_checkpoints_parameters(run):
  rows = completions(run)
  losses = run.metrics["eval_loss"]
  lowered = [n for n in range(1, 5) if losses[n - 1] == min(losses[:n])]
  assert [row["step"] for row in rows] == sorted({*lowered, 2, 4})
  assert {row["prompt"] for row in rows} == {"to be"}
  completer = Completer(run.config, run.program, ["to be"])
  assert rows[-1]["text"] == completer.complete(run.params)[0]
  with compilations() as found:
    assert rows[-1]["text"] == completer.complete(run.params)[0]
  assert not found


@pytest.mark.slow
def test_a_resumed_run_drops_completions_of_later_steps(run, tmp_path):
  rows = [{"step": step, "prompt": "a", "text": "b"} for step in (1, 2, 2, 3, 4)]
  file = tmp_path / "completions.jsonl"
  file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  callback = CompletionsCallback()
  callback.on_start(CallbackContext(run.config, tmp_path, run.program, Writers([]), 3))
  callback.on_end(4, "")
  assert [json.loads(line) for line in file.read_text().splitlines()] == rows[:3]


@pytest.mark.slow
def test_tensorboard_has_the_config_the_plots_and_the_completions(run):
  data = b"".join(path.read_bytes() for path in (run.folder / "tensorboard").iterdir())
  names = (b"eval_loss", b"config/text_summary", b"completions/text_summary", b"curves")
  for content in (*names, b"    run_name: run", b"\x89PNG"):
    assert content in data


@pytest.mark.skipif(not HAS_WANDB, reason="wandb is an optional extra: pip install maxlite[wandb]")
def test_weights_and_biases_has_the_rows_the_plots_and_the_config(run):
  (folder,) = (run.folder / "wandb").glob("offline-run-*")
  data = b"".join(path.read_bytes() for path in folder.glob("*.wandb"))
  assert run.folder.joinpath("run_id").read_text() in folder.name
  for name in (b"grad_norm", b"eval_loss", b"base_emb_dim", b"completions", b"curves"):
    assert name in data
  assert list((folder / "files/media/images").glob("curves_*.png"))


@pytest.mark.slow
def test_convert_exports_the_best_checkpoint(run, tmp_path, monkeypatch):
  best = maxlite.open_run(run.folder, load_checkpoint="best")
  assert (best.step, run.step) == (np.argmin(run.metrics["eval_loss"]) + 1, 4)
  place = (f"run_name={run.folder.name}", f"base_output_directory={run.folder.parent}")
  for which, expected in (("best", best), ("latest", run)):
    output = (f"output_path={tmp_path / which}", f"load_checkpoint={which}")
    monkeypatch.setattr(sys, "argv", ["convert", "to_hf", *place, *output])
    assert convert.main() == 0
    exported = load_file(tmp_path / which / "model.safetensors")["model.norm.weight"]
    np.testing.assert_array_equal(exported, expected.params["final_norm"]["scale"])
  assert not np.array_equal(best.params["final_norm"]["scale"], run.params["final_norm"]["scale"])
