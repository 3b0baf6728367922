"""The run folder rejects another model and keeps all configs of the run."""

import dataclasses
import os
import re
import socket
import subprocess
import sys

import pytest

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import load_config
from maxlite.config.raw_values import FrozenMapping, show
from maxlite.config.saved import read_saved, read_values
from maxlite.config.schema import Config, flatten
from maxlite.config.yaml_files import read_model_file
from maxlite.errors import UserError


def start(folder, **changes):
  """Check and save the config as a start of the run does; return the changes."""
  base = Config()
  sections = {}
  for field in dataclasses.fields(base):
    section = getattr(base, field.name)
    own_changes = {key: value for key, value in changes.items() if hasattr(section, key)}
    sections[field.name] = dataclasses.replace(section, **own_changes)
  config = Config(**sections)
  found = folder.config_changes(flatten(config))
  folder.save_config(config, found)
  return found


@pytest.fixture
def folder(tmp_path):
  return RunFolder(tmp_path / "mine")


def test_the_first_start_saves_the_config(folder):
  assert start(folder, steps=7) is None
  assert read_saved(folder.config)["steps"] == 7
  assert [path.name for path in folder.directory.iterdir()] == ["config.yml"]


LOCK = """
import sys, time
from maxlite.checkpoint.run_folder import RunFolder
RunFolder(sys.argv[1]).lock()
print(flush=True)
time.sleep(600)
"""


def test_a_folder_is_locked_until_its_process_is_killed(folder):
  argv = [sys.executable, "-c", LOCK, folder.directory]
  with subprocess.Popen(argv, stdout=subprocess.PIPE) as other:
    other.stdout.readline()
    held = f"mine is in use by process {other.pid} on {socket.gethostname()}: wait until it ends"
    with pytest.raises(UserError, match=re.escape(held)):
      folder.lock()
    other.kill()
    other.wait()
    folder.lock()
    folder.unlock()


def test_the_same_config_writes_nothing(folder):
  start(folder, steps=7)
  before = folder.config.stat().st_mtime_ns
  assert start(folder, steps=7) == {}
  assert folder.config.stat().st_mtime_ns == before
  assert [path.name for path in folder.directory.iterdir()] == ["config.yml"]


def test_changes_are_returned_and_every_config_is_kept(folder):
  start(folder, steps=7)
  assert start(folder, steps=8, learning_rate=1.0) == {
    "steps": (7, 8),
    "learning_rate": (2e-3, 1.0),
  }
  assert start(folder, steps=9, learning_rate=1.0) == {"steps": (8, 9)}
  steps = {path.name: read_saved(path)["steps"] for path in folder.directory.iterdir()}
  assert steps == {"config.1.yml": 7, "config.2.yml": 8, "config.yml": 9}


def test_another_model_raises_and_writes_nothing(folder):
  start(folder)
  before = folder.config.read_text()
  message = (
    f"run folder {folder.directory} was made with base_emb_dim=256 head_dim=32, this command says "
    "base_emb_dim=128 head_dim=16: choose another run_name, or set base_emb_dim=256 head_dim=32"
  )
  with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
    start(folder, base_emb_dim=128, head_dim=16, steps=9)
  assert folder.config.read_text() == before
  assert [path.name for path in folder.directory.iterdir()] == ["config.yml"]


def test_a_folder_holds_a_run_or_an_ensemble(folder, tmp_path):
  members = (FrozenMapping([("name", "a")]),)
  start(folder)
  assert start(folder, members=members) is not None  # nothing was trained
  start(folder)
  folder.metrics.write_text("{}\n")
  fix = f"load_parameters_path={re.escape(folder.place)} starts all members from its parameters"
  with pytest.raises(UserError, match=f"holds a single run, .* another run_name; {fix}$"):
    start(folder, members=members)
  ensemble = RunFolder(tmp_path / "ensemble")
  start(ensemble, members=members)
  member = ensemble.directory / "members" / "a"
  member.mkdir(parents=True)
  (member / "config.yml").touch()
  assert start(ensemble, members=members, steps=9) is not None
  with pytest.raises(UserError, match="holds an ensemble, and this command trains a single run"):
    start(ensemble)


def test_an_imported_run_fixes_only_its_model_before_training(folder):
  start(folder)
  folder.model.write_text("base_emb_dim: 256\n")
  with pytest.raises(ValueError, match="base_emb_dim=256"):
    start(folder, base_emb_dim=128)
  folder.metrics.write_text("{}\n")
  with pytest.raises(ValueError, match="opt_type=adamw"):
    start(folder, opt_type="lion")
  folder.metrics.unlink()
  assert start(folder, opt_type="lion") == {"opt_type": ("adamw", "lion")}


OTHER_FUNCTIONS = {
  "router": "topk_softmax",
  "routed_scaling_factor": 2.5,
  "mlp_activations_limit": 7.0,
}


@pytest.mark.parametrize(("key", "value"), list(OTHER_FUNCTIONS.items()))
def test_a_trained_run_keeps_its_function_unless_changes_are_allowed(folder, key, value):
  def with_key(**keys):
    model = load_config([f"{key}={show(value)}"]).model
    return dataclasses.replace(load_config([]), model=model, **keys)

  start(folder)
  folder.metrics.write_text("{}\n")
  changed = flatten(with_key())
  with pytest.raises(
    UserError, match=rf"was trained with {key}=.*or write allow_changes=\[{key}\]"
  ):
    folder.config_changes(changed)
  changes = folder.config_changes(changed | {"allow_changes": (key,)})
  assert key in changes
  with pytest.raises(UserError, match=key):
    folder.config_changes(changed | {"allow_changes": ("steps",)})


def test_keys_of_layers_that_the_model_does_not_have_may_change(folder):
  def dense(**keys):
    return load_config(["decoder_block=llama", *(f"{key}={value}" for key, value in keys.items())])

  folder.save_config(dense(), None)
  folder.metrics.write_text("{}\n")
  assert folder.config_changes(flatten(dense(num_experts=4))) == {"num_experts": (8, 4)}
  with pytest.raises(UserError, match="base_mlp_dim=1024"):
    folder.config_changes(flatten(dense(base_mlp_dim=64)))


def test_the_scale_of_adapters_is_part_of_the_function(tmp_path):
  for rank, is_refused in ((0, False), (4, True)):
    folder = RunFolder(tmp_path / str(rank))
    folder.save_config(load_config([f"lora_rank={rank}", "lora_alpha=16"]), None)
    folder.metrics.write_text("{}\n")
    other = flatten(load_config([f"lora_rank={rank}", "lora_alpha=8"]))
    if is_refused:
      with pytest.raises(UserError, match="lora_alpha=16"):
        folder.config_changes(other)
    else:
      assert folder.config_changes(other) == {"lora_alpha": (16.0, 8.0)}


@pytest.mark.parametrize(
  ("name", "make", "problem"),
  [
    ("metrics.jsonl", lambda path: path.mkdir(), "is a folder"),
    ("metrics.jsonl", lambda path: path.symlink_to(path.name), "is a loop of links"),
    ("metrics.jsonl", os.mkfifo, "is not a file"),
    ("metrics.jsonl", lambda path: path.symlink_to(__file__), "is a link to .*py"),
    ("eval_documents.jsonl", lambda path: path.symlink_to(__file__), "is a link to .*py"),
    ("members.jsonl", os.mkfifo, "is not a file"),
    ("config.yml", lambda path: path.symlink_to("/dev/zero"), "is a link to /dev/zero"),
    ("run_id", lambda path: path.mkdir(), "is a folder"),
    (".lock", lambda path: path.symlink_to("../other"), "is a link to nothing"),
    ("config.yml", lambda path: path.symlink_to("nothing"), "is a link to nothing"),
    (".lock", lambda path: path.mkdir(), "is a folder"),
    ("checkpoints", lambda path: path.symlink_to(path.name), "is a loop of links"),
    ("checkpoints", lambda path: path.touch(), "is not a folder"),
  ],
)
def test_a_path_of_another_kind_is_named(tmp_path, name, make, problem):
  folder = RunFolder(tmp_path / "run")
  folder.directory.mkdir()
  make(folder.directory / name)
  for check in (folder.require_writable, folder.lock):
    with pytest.raises(UserError, match=f"run: {name} {problem}: move it away"):
      check()


def test_a_run_keeps_the_id_of_its_checkpoints(tmp_path):
  folder = RunFolder(tmp_path)
  assert folder.saved_run_id() == ""
  assert folder.run_id("of its checkpoints") == "of its checkpoints"
  assert folder.run_id() == folder.saved_run_id() == "of its checkpoints"


def test_a_lock_is_no_link_to_another_file(folder, tmp_path):
  """Not even if it becomes one after the check."""
  folder.directory.mkdir()
  (tmp_path / "victim").write_text("precious")
  (folder.directory / ".lock").symlink_to(tmp_path / "victim")
  folder.require_regular = lambda: None
  with pytest.raises(UserError, match=r"\.lock is a link to .*victim"):
    folder.lock()
  assert (tmp_path / "victim").read_text() == "precious"


def test_a_previous_config_is_not_kept_through_a_link(folder, tmp_path):
  start(folder, steps=7)
  (folder.directory / "config.1.yml").symlink_to(tmp_path / "victim")
  start(folder, steps=8)
  assert not (tmp_path / "victim").exists()
  assert read_saved(folder.directory / "config.2.yml")["steps"] == 7


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("read", [read_saved, read_values, read_model_file])
def test_a_config_that_is_no_file_is_refused_at_once(folder, make, read):
  folder.directory.mkdir()
  make(folder.config)
  with pytest.raises(UserError, match=r"config\.yml is (not a file|a link to /dev/zero)"):
    read(folder.config)


def test_a_config_larger_than_any_is_refused(folder):
  start(folder)
  os.truncate(folder.config, 1 << 40)
  with pytest.raises(UserError, match=r"config\.yml has more than 4,194,304 bytes"):
    read_saved(folder.config)


@pytest.mark.parametrize(
  ("make", "problem"),
  [
    (lambda path: path.write_text("../../home"), "the file run_id is damaged: remove it"),
    (lambda path: path.write_text("/"), "the file run_id is damaged"),
    (lambda path: path.write_bytes(bytes(range(256))), "the file run_id is damaged"),
    (lambda path: path.write_text("a" * 65), "the file run_id is damaged"),
    (lambda path: path.write_text("a" * 5000), "has more than 4,096 bytes"),
    (lambda path: path.mkdir(), "run_id is a folder"),
    (lambda path: path.symlink_to("/dev/zero"), "run_id is a link to /dev/zero"),
    (os.mkfifo, "run_id is not a file"),
  ],
)
def test_a_run_id_is_a_name(folder, make, problem):
  """Local checkpoints are in a folder of this name, which is removed at the end of a run."""
  folder.directory.mkdir()
  make(folder.directory / "run_id")
  for read in (folder.saved_run_id, folder.run_id):
    with pytest.raises(UserError, match=problem):
      read()


def test_an_empty_run_id_is_none(folder):
  folder.directory.mkdir()
  (folder.directory / "run_id").touch()
  assert folder.saved_run_id() == ""
  assert folder.run_id("x") == folder.saved_run_id() == "x"


@pytest.mark.parametrize(
  "line", ["", "nonsense", "[]", "{}", '{"name": "a"}', "[" * 100_000, '{"name": NaN}', "null", "1"]
)
def test_damaged_results_of_members_are_one_line(folder, line):
  (folder.directory / "members" / "a").mkdir(parents=True)
  (folder.directory / "members" / "a" / "config.yml").touch()
  (folder.directory / "members.jsonl").write_text(f"{line}\n")
  with pytest.raises(UserError, match=r"line 1 of members\.jsonl is not a member's result"):
    folder.member("best")
