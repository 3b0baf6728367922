"""Plug-ins register families, routers, losses and others; the config of a run finds them."""

import contextlib
import dataclasses
import io
import sys
from pathlib import Path

import numpy as np
import pytest
from support.tiny import KEYS as TINY
from support.tiny_run import empty_plots, keys_in

import maxlite
from maxlite import registry
from maxlite.config import Config, load_config, read_saved, save_resolved
from maxlite.config.model_families import MODELS
from maxlite.config.schema import RunConfig
from maxlite.ensemble.__main__ import _read_config
from maxlite.metrics.writers import read_rows
from maxlite.runs.saved_run import config_of_run
from maxlite.training.model_folders import check_model_folders
from maxlite.training.model_weights import RunWeights

EXAMPLE = Path(__file__).parents[2] / "docs/examples/plugin.py"
CHOICES = {
  "decoder_block": "sandwich",
  "router": "sqrt_softmax",
  "lr_schedule_type": "inverse_sqrt",
  "callbacks": ["norms"],
}
TABLES = (
  *(MODELS, registry.PLAIN_ROUTERS, registry.SCHEDULES, registry.TOKEN_LOSSES),
  registry.CALLBACKS,
)


def forget():
  """Restores the tables, as in a new process."""
  sys.modules.pop("plugin", None)
  for table in TABLES:
    for name in ("sandwich", "sqrt_softmax", "inverse_sqrt", "confident", "norms"):
      table.pop(name, None)


@pytest.fixture(autouse=True)
def new_process(monkeypatch):
  monkeypatch.setattr(sys, "path", [*sys.path])
  forget()
  yield
  forget()


@pytest.mark.slow
def test_the_example_trains_and_its_run_is_opened_without_naming_it(tmp_path, monkeypatch):
  monkeypatch.chdir(EXAMPLE.parent)
  phases = [{"name": "all", "train": [".*"], "loss": "confident", "steps": 1}]
  keys = TINY | keys_in(tmp_path) | {"steps": 2, "scan_unroll": 1, "base_num_decoder_layers": 1}
  keys |= {"warmup_steps_fraction": 0, "ema_decay": 0, "gradient_accumulation_steps": 1}
  output = io.StringIO()
  with contextlib.redirect_stdout(output), empty_plots():
    run = maxlite.train(plugins=["plugin.py"], phases=phases, **keys | CHOICES)
  assert f"  plugins=[{EXAMPLE}] (default [])\n" in output.getvalue()
  np.testing.assert_allclose(run.metrics["learning_rate"], 2e-3 / np.sqrt([1, 2]), rtol=1e-6)
  assert [row["step"] for row in read_rows(run.folder / "norms.jsonl")] == [1, 2]
  forget()
  monkeypatch.chdir(tmp_path)
  assert "plugin" not in sys.modules
  opened = maxlite.open_run(run.folder, trust_plugins=True)
  trusting = dataclasses.replace(run.config.run, trust_plugins=True)
  assert opened.config == dataclasses.replace(run.config, run=trusting)
  assert opened.evaluate(2)["eval_loss"] == run.rows[-1]["eval_loss"]


def test_a_plugin_is_not_imported_before_other_keys_are_checked():
  with pytest.raises(maxlite.UserError, match="steps=0 is below 1"):
    load_config([f"plugins={EXAMPLE}", "router=sqrt_softmax", "steps=0"])
  assert "plugin" not in sys.modules
  with pytest.raises(
    maxlite.UserError, match=r"router=sqrt_softmaxx is not one of .*sqrt_softmax, "
  ):
    load_config([f"plugins={EXAMPLE}", "router=sqrt_softmaxx"])


def test_without_the_plugin_its_names_are_not_choices():
  with pytest.raises(maxlite.UserError, match="router=sqrt_softmax is not one of softmax_topk, "):
    load_config(["router=sqrt_softmax"])


@pytest.mark.parametrize(
  ("plugin", "message"),
  [
    ("none.py", r"plugins=none.py cannot be imported: there is no file .*/none.py; correct"),
    ("no_module", "cannot be imported: ModuleNotFoundError: No module named 'no_module'; write"),
    ("broken.py", r"cannot be imported: SyntaxError: .*broken.py, line 1"),
    ("needs.py", "cannot be imported: ModuleNotFoundError: No module named 'not_installed'"),
    ("exits.py", r"plugins=exits.py ends the program \(sys.exit\(3\)\); remove that call"),
    ("json.py", "has the name of another module, .*json/__init__.py; rename the file"),
    ("a-b.py", "a-b.py is not the name of a module; rename it"),
  ],
)
def test_a_plugin_that_cannot_be_imported_is_one_line(tmp_path, monkeypatch, plugin, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "broken.py").write_text("def f(:\n")
  (tmp_path / "needs.py").write_text("import not_installed\n")
  (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
  for name in ("json.py", "a-b.py"):
    (tmp_path / name).touch()
  with pytest.raises(maxlite.UserError, match=message):
    load_config([f"plugins={plugin}"])


def test_a_saved_plugin_that_is_missing_is_one_line_with_the_file(tmp_path):
  source = tmp_path / "gone.py"
  source.touch()
  save_resolved(load_config([f"plugins={source}"]), tmp_path / "config.yml")
  source.unlink()
  with pytest.raises(maxlite.UserError, match=r"config.yml:\d+: plugins=.*gone.py. cannot be imp"):
    read_saved(tmp_path / "config.yml", load_config(["trust_plugins=true"]))


def _open_by_name(folder):
  config_of_run([f"base_output_directory={folder.parent}", f"run_name={folder.name}"])


def _train_from(folder):
  check_model_folders(load_config([f"load_parameters_path={folder}"]))


def _teach_by(folder):
  check_model_folders(load_config([f"teacher_path={folder}", "loss_type=distill"]))


def _read_weights(folder):
  RunWeights(folder, load_config([]))


def _export(folder):
  _read_config(folder, trust_plugins=False)


def _resume_by_file(folder):
  load_config([str(folder / "config.yml")])


def _build_on_file(folder):
  (folder.parent / "mine.yml").write_text(f"base_config: {folder}/config.yml\n")
  load_config([str(folder.parent / "mine.yml")])


@pytest.mark.parametrize(
  "open_folder",
  [
    *(maxlite.load, maxlite.open_run, _open_by_name, _train_from, _teach_by, _read_weights),
    *(_export, _resume_by_file, _build_on_file),
  ],
)
def test_opening_a_folder_does_not_import_what_it_names(tmp_path, open_folder):
  folder = tmp_path / "downloaded"
  source = folder / "plugin.py"
  (folder / "checkpoints/1").mkdir(parents=True)
  source.write_text("raise SystemExit('code of a stranger')\n")
  config = dataclasses.replace(Config(), run=RunConfig(plugins=(str(source),), trust_plugins=True))
  save_resolved(config, folder / "config.yml")
  message = (
    r"config.yml:\d+: plugins=.* names code, which opening a run does not execute; write plug"
  )
  with pytest.raises(maxlite.UserError, match=message):
    open_folder(folder)
  assert "plugin" not in sys.modules


def test_a_command_that_names_a_plugin_opens_runs_that_need_one(tmp_path):
  (tmp_path / "own_plugin.py").write_text("answer = 42\n")
  plugins = (str(tmp_path / "own_plugin.py"),)
  there = dataclasses.replace(Config(), run=RunConfig(plugins=("/their/own_plugin.py",)))
  save_resolved(there, tmp_path / "config.yml")
  command = load_config([f"plugins={plugins[0]}"])
  assert read_saved(tmp_path / "config.yml", command)["plugins"] == plugins
  sys.modules.pop("own_plugin")


def test_a_module_of_the_working_folder_is_found(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "own_plugin.py").write_text("answer = 42\n")
  assert load_config(["plugins=own_plugin"]).run.plugins == ("own_plugin",)
  assert sys.modules.pop("own_plugin").answer == 42
