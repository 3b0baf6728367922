"""`maxlite.train` is the command as a function; callbacks; runs opened from their folders."""

import contextlib
import io
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from support.tiny import KEYS
from support.tiny_run import (
  STEPS,
  assert_equals_uninterrupted,
  empty_plots,
  keys_in,
  shared_programs,
)

import maxlite
from maxlite.api.arguments import change_config
from maxlite.config import load_config
from maxlite.runs.saved_run import config_of_run

TINY = {key: value for key, value in KEYS.items() if key != "base_mlp_dim"}  # of dense models


def train(folder, **keys):
  """(run, output) of `maxlite.train`."""
  output = io.StringIO()
  callbacks = keys.pop("callbacks", ())
  with contextlib.redirect_stdout(output), shared_programs(), empty_plots():
    run = maxlite.train(callbacks=callbacks, **TINY | keys_in(folder, **keys))
  return run, output.getvalue()


class Recorder(maxlite.Callback):
  """Records its calls, and raises an error after the checkpoint of a step."""

  def __init__(self, fails_at=None):
    self.calls = []
    self.hashes = []
    self._fails_at = fails_at

  def on_start(self, context):
    self.calls.append(("start", context.first_step, context.folder.name))

  def on_row(self, row):
    self.calls.append(("row", row["step"], "eval_loss" in row))

  def on_checkpoint(self, step, state):
    self.calls.append(("checkpoint", step, int(state.step)))
    time.sleep(0.1)
    if step == self._fails_at:
      raise RuntimeError("the callback failed")

  def on_end(self, step, reason):
    self.calls.append(("end", step, reason))


@pytest.fixture(scope="module")
def interrupted(runs_folder):
  """(folder, recorder, run, output) of a run that a callback stopped by an error, and resumed."""
  folder = runs_folder / "interrupted"
  with pytest.raises(RuntimeError, match="the callback failed"):
    train(folder, callbacks=[Recorder(fails_at=4)])
  recorder = Recorder()
  run, output = train(folder, callbacks=[recorder])
  return folder, recorder, run, output


@pytest.mark.slow
def test_a_run_from_python_equals_that_of_the_command(finished, interrupted):
  folder, _, run, output = interrupted
  assert "resuming from the checkpoint of step 4" in output
  assert_equals_uninterrupted(folder, output, finished)
  assert (run.step, run.stopped, run.folder) == (STEPS, "", folder / "run")
  again, output = train(folder)
  assert "nothing to do" in output
  jax.tree.map(np.testing.assert_array_equal, again.params, run.params)
  jax.tree.map(np.testing.assert_array_equal, again.ema_params, run.ema_params)


def test_callbacks_are_called_in_order(interrupted):
  expected = [("start", 5, "run")]
  for step in range(5, STEPS + 1):
    expected.append(("row", step, step == STEPS))
    if step % 2 == 0:
      expected.append(("checkpoint", step, step))
  assert interrupted[1].calls == [*expected, ("end", STEPS, "")]


def test_callbacks_do_not_count_as_checkpoints(interrupted):
  row = interrupted[2].rows[-1]  # after the checkpoints of steps 2, 4 and 6; that of 4 is resumed
  assert row["callbacks_share"] * row["elapsed_seconds"] >= 0.2


def test_metrics_are_arrays_of_the_rows(interrupted):
  run = interrupted[2]
  assert run.metrics["step"].tolist() == list(range(1, STEPS + 1))
  np.testing.assert_array_equal(run.metrics["loss"], [row["loss"] for row in run.rows])
  has_loss = ~np.isnan(run.metrics["eval_loss"])
  assert (np.flatnonzero(has_loss) + 1).tolist() == [4, 8]


def test_an_opened_run_has_the_parameters_and_the_held_out_loss(interrupted):
  folder, _, run, _ = interrupted
  with shared_programs():
    opened = maxlite.open_run(folder / "run")
    result = opened.evaluate(2)
  with pytest.raises(maxlite.UserError, match="eval_steps=0: evaluates nothing"):
    opened.evaluate(0)
  with pytest.raises(maxlite.UserError, match="does not read load_checkpoint: give it to open_run"):
    opened.generate(["a"], load_checkpoint="best", decode_sampling_temperature=0)
  with pytest.raises(maxlite.UserError, match="takes a list of prompts"):
    opened.generate("to be")
  expected = {name: x for name, x in run.rows[-1].items() if name.startswith("eval_")}
  assert result == expected
  _, params = maxlite.load(folder / "run")
  for loaded in (opened.params, params):
    jax.tree.map(np.testing.assert_array_equal, loaded, run.params)


@pytest.mark.slow
def test_an_ensemble_is_opened_by_members(finished, tmp_path):
  for name in ("a", "b"):
    (tmp_path / "both/members").mkdir(parents=True, exist_ok=True)
    (tmp_path / "both/members" / name).symlink_to(finished[0] / "run")
  (tmp_path / "both/config.yml").write_text((finished[0] / "run/config.yml").read_text())
  members = maxlite.open_run(tmp_path / "both")
  assert list(members) == ["a", "b"]
  assert (members["b"].step, members["b"].folder.name) == (STEPS, "b")
  with pytest.raises(maxlite.UserError, match=r"has no members.jsonl, which ranks the members at"):
    maxlite.load(tmp_path / "both", member="best")
  (tmp_path / "both/members.jsonl").write_text(
    '{"name": "b", "best_loss": 2.5}\n{"name": "a", "best_loss": 3.5}\n'
  )
  best = maxlite.open_run(tmp_path / "both", member="best")
  assert (best.step, best.folder.name) == (STEPS, "b")
  assert maxlite.open_run(tmp_path / "both", member="a").folder.name == "a"
  _, params = maxlite.load(tmp_path / "both", member="best")
  jax.tree.map(np.testing.assert_array_equal, params, best.params)
  argv = ["run_name=both", f"base_output_directory={tmp_path}", "member=best"]
  assert config_of_run(argv).run.run_name == "b"
  (tmp_path / "both/members.jsonl").write_text('{"name": "b", "best_loss": null}\n')
  with pytest.raises(maxlite.UserError, match="no member has a held-out loss"):
    maxlite.open_run(tmp_path / "both", member="best")


def test_a_run_is_shown_in_one_line(interrupted):
  run = interrupted[2]
  num_parameters = sum(leaf.size for leaf in jax.tree.leaves(run.params))
  last = run.rows[-1]
  losses = f"loss {last['loss']:.4f}, eval_loss {last['eval_loss']:.4f}"
  counts = f"{num_parameters:,} parameters"
  assert repr(run) == f"<Run 'run': step {STEPS} of {STEPS}, {losses}, {counts}, in {run.folder}>"


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"stepz": 3}, "command line: stepz=3 is not a key; did you mean steps?"),
    ({"steps": None}, "command line: steps=null is not a whole number"),
    ({"steps": object()}, "steps: object is not a type of keys; write a number"),
    ({"steps": 0}, "command line: steps=0 is below 1; write steps=1 or more"),
    ({"config": "none.yml"}, "command line: none.yml cannot be read"),
    ({"callbacks": ["none"]}, "command line: callbacks=.*none.* is not one of completions"),
    ({"callbacks": [print]}, "callbacks: <built-in function print> is not a Callback: write a sub"),
    (
      {"callbacks": [Recorder]},
      "test_api.Recorder'> is not a Callback: write a subclass of",
    ),
    ({"callbacks": "completions"}, r"callbacks is not a list: write callbacks=\[...\]"),
    ({"config": {"stepz": 3}}, "config: stepz=3 is not a key; did you mean steps?"),
    ({"config": 3}, "the config is of type int: pass a file, a list of files or a mapping"),
    ({"config": [{"steps": 3}]}, "the config is a list with .*: it may only hold names of files"),
    ({"num_processes": 2}, "trains in one process"),
    (
      {"members": [{"learning_rate": 0.1}], "callbacks": [Recorder()]},
      "not supported by ensembles",
    ),
  ],
)
def test_a_mistake_raises_one_line(tmp_path, keys, message):
  config = keys.pop("config", ())
  with pytest.raises(maxlite.UserError, match=message) as error:
    maxlite.train(config, **TINY | {"base_output_directory": tmp_path} | keys)
  assert "\n" not in str(error.value)
  assert not list(tmp_path.iterdir())


def test_python_values_are_those_of_the_command_line(tmp_path):
  (tmp_path / "a.yml").write_text("steps: 3\nlearning_rate: 0.5\n")
  phases = [
    {"name": "all", "train": [".*"], "until": {"metric": "loss", "max_steps": 5, "below": 2}}
  ]
  values = {"steps": 7, "adam_eps": 1e-9, "packing": True, "phases": phases, "prompt": "a, [b]: c"}
  text = "phases=[{name: all, train: [.*], until: {metric: loss, max_steps: 5, below: 2}}]"
  argv = [f"{tmp_path}/a.yml", "steps=7", "adam_eps=1e-9", "packing=true", text, "prompt=a, [b]: c"]
  config = change_config(tmp_path / "a.yml", values)
  assert config == load_config(argv)
  assert change_config(config, {"steps": np.int64(9)}).run.steps == 9
  paths = change_config(config, {"dataset_path": [tmp_path], "learning_rate": np.float32(0.5)})
  assert (paths.data.dataset_path, paths.optimizer.learning_rate) == ((str(tmp_path),), 0.5)
  assert change_config(config, {}) == config


@pytest.mark.slow
def test_a_python_config_trains_as_the_command_and_is_saved_as_yaml(finished, runs_folder):
  folder = runs_folder / "from_python"
  config = maxlite.get_config(**TINY | keys_in(folder))
  (runs_folder / "own.py").write_text(f"def get_config(): return {config.to_dict()!r}")
  with contextlib.redirect_stdout(io.StringIO()), shared_programs(), empty_plots():
    run = maxlite.train(runs_folder / "own.py")
    again = maxlite.train(config)
  expected = maxlite.open_run(finished[0] / "run")
  for params in (run.params, again.params):
    jax.tree.map(np.testing.assert_array_equal, params, expected.params)
  assert not list(folder.rglob("*.py"))
  saved = maxlite.get_config(run.folder / "config.yml", jax_cache_dir=config.jax_cache_dir)
  assert saved.to_dict() == config.to_dict()


def test_dir_lists_the_names_of_the_api():
  names = dir(maxlite)
  assert {"train", "load", "open_run", "get_config", "Config", "Run", "Callback"} <= {*names}
  assert not {"importlib", "sys", "Any", "ModuleType"} & {*names}
  assert all(getattr(maxlite, name) is not None for name in names)


def test_the_package_is_light():
  code = (
    "import sys, maxlite; assert not {'jax', 'numpy', 'yaml'} & {*sys.modules}; "
    "assert callable(maxlite.train) and 'jax' not in sys.modules"
  )
  subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
  "imports",
  [
    "import maxlite.train",
    "from maxlite.train import main",
    "maxlite.train; from maxlite.train import main",
    "import importlib; assert importlib.import_module('maxlite.train').main",
  ],
)
def test_the_module_of_the_command_does_not_replace_the_function(imports):
  code = (
    f"import inspect, pickle, maxlite; {imports}; from maxlite import train; "
    "assert train is maxlite.train is pickle.loads(pickle.dumps(train)); "
    "assert 'callbacks' in inspect.signature(train).parameters"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
