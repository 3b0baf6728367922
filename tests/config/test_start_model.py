"""A run that starts from another model takes its keys and its tokenizer."""

import dataclasses
import json
from pathlib import Path

import pytest

from maxlite.api.arguments import change_config
from maxlite.config import load_config
from maxlite.config.saved import save_resolved
from maxlite.config.schema import flatten
from maxlite.errors import UserError
from maxlite.hf.hf_tokenizer import byte_tokenizer
from maxlite.storage.tokenizer_files import copy_tokenizer
from maxlite.training.model_folders import check_model_folders

ROOT = Path(__file__).resolve().parents[2]
BASE = str(ROOT / "configs" / "base.yml")
LORA = str(ROOT / "configs" / "chat" / "lora.yml")
DPO = str(ROOT / "configs" / "chat" / "dpo.yml")
HF = ROOT / "tests" / "hf" / "hf_fixtures" / "llama"
FULL = ["phases=[]", "lora_rank=0"]


@pytest.fixture
def runs(tmp_path):
  (tmp_path / "source").mkdir()
  byte_tokenizer().save(str(tmp_path / "source" / "tokenizer.json"))
  return tmp_path / "runs"


def write_run(runs, name, *argv):
  """Save the config of a run as its start does."""
  cfg = load_config([*argv, f"base_output_directory={runs}", f"run_name={name}"])
  copy_tokenizer(flatten(cfg), runs / name)
  save_resolved(cfg, runs / name / "config.yml")


def start(runs, *argv, name="new"):
  """The config of a new run, checked as `maxlite.train` does before JAX is imported."""
  argv = [BASE, *argv, f"base_output_directory={runs}", f"run_name={name}"]
  cfg = load_config(argv, needs_data=False)
  check_model_folders(cfg)
  return cfg


@pytest.fixture
def parent(runs):
  tokenizer = f"tokenizer_path={runs.parent}/source/tokenizer.json"
  model = ["decoder_block=qwen3", "base_emb_dim=48", "rope_max_timescale=777", "dtype=bfloat16"]
  model += ["add_bos=false"]
  write_run(runs, "parent", *model, "tokenizer_type=huggingface", tokenizer)
  return runs / "parent"


def test_a_run_takes_model_tokenizer_and_dtype_of_the_run_it_starts_from(runs, parent):
  for key in ("from_run=parent", f"load_parameters_path={parent}"):
    cfg = start(runs, key)
    assert cfg.checkpoint.load_parameters_path == str(parent)
    assert cfg.model.decoder_block == "qwen3"
    assert cfg.model.base_emb_dim == 48  # configs/base.yml sets another
    assert cfg.model.rope.rope_max_timescale == 777
    assert cfg.model.dtype == "bfloat16"
    assert cfg.data.add_bos == "false"
    assert cfg.data.tokenizer_path == f"{parent}/tokenizer/tokenizer.json"


def test_a_run_takes_the_model_of_a_hugging_face_folder(runs):
  cfg = start(runs, f"load_parameters_path={HF}", "dataset_type=synthetic")
  assert cfg.model.decoder_block == "llama"
  assert cfg.model.vocab_size == json.loads((HF / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize(
  "key", ["base_emb_dim=64", "scan_layers=false", "vocab_size=512", "decoder_block=llama"]
)
def test_a_key_that_the_weights_do_not_fit_is_named(runs, parent, key):
  with pytest.raises(UserError, match=rf"other shapes than {key} \(there .*\): remove these"):
    start(runs, "from_run=parent", key)


def test_a_key_that_shapes_no_weights_may_differ(runs, parent):
  assert start(runs, "from_run=parent", "dtype=float32").model.dtype == "float32"


def test_another_tokenizer_is_an_error(runs, parent):
  other = runs.parent / "other.json"
  other.write_text((runs.parent / "source" / "tokenizer.json").read_text() + "\n")
  with pytest.raises(UserError, match="is another file than the tokenizer_path of"):
    start(runs, "from_run=parent", f"tokenizer_path={other}")
  with pytest.raises(UserError, match="tokenizer_type"):
    start(runs, "from_run=parent", "tokenizer_type=byte", "tokenizer_path=")


def test_adapters_are_taken_or_added_but_not_dropped(runs, parent):
  added = start(runs, LORA, "from_run=parent", "lora_rank=4")
  assert added.model.lora.lora_rank == 4
  write_run(runs, "adapted", LORA, "lora_rank=4", "lora_alpha=3", "tokenizer_type=byte",
            f"chat_template_path={ROOT}/configs/chat/plain.jinja",
            f"dataset_path={ROOT}/configs/chat/python.jsonl")  # fmt: skip
  taken = start(runs, LORA, "from_run=adapted")
  assert (taken.model.lora.lora_rank, taken.model.lora.lora_alpha) == (4, 3)
  assert taken.data.chat_template_path == f"{runs}/adapted/tokenizer/given_template.jinja"
  with pytest.raises(UserError, match=r"lora_rank=8 \(there 4\)"):
    start(runs, LORA, "from_run=adapted", "lora_rank=8")
  with pytest.raises(UserError, match=r"lora_rank=0 \(there 4\)"):
    start(runs, "from_run=adapted", "lora_rank=0")


def test_the_reference_of_dpo_is_the_model_that_training_starts_from(runs, parent):
  template = f"chat_template_path={ROOT}/configs/chat/plain.jinja"
  for name in ("adapted", "other"):
    write_run(runs, name, LORA, "lora_rank=4", template,
              f"dataset_path={ROOT}/configs/chat/python.jsonl")  # fmt: skip
  after_adapters = start(runs, DPO, "from_run=adapted")
  assert after_adapters.training.reference_path == str(runs / "adapted")
  whole = start(runs, DPO, "from_run=parent", *FULL, template)
  assert whole.training.reference_path == str(parent)
  # Without the adapters that it adds, the model is the one it starts from.
  assert start(runs, DPO, "from_run=parent", template).training.reference_path == ""
  other = runs / "other"
  given = start(runs, DPO, "from_run=adapted", f"reference_path={other}")
  assert given.training.reference_path == str(other)
  with pytest.raises(UserError, match="tokenizer_type=huggingface, the run byte"):
    start(runs, DPO, "from_run=adapted", f"reference_path={parent}", "vocab_size=320")


def test_a_run_that_has_started_does_not_read_its_parent(runs, parent):
  first = start(runs, "from_run=parent")
  copy_tokenizer(flatten(first), runs / "new")
  save_resolved(first, runs / "new" / "config.yml")
  parent.rename(runs / "gone")
  argv = [BASE, "from_run=parent", f"base_output_directory={runs}", "run_name=new"]
  again = load_config(argv)
  check_model_folders(again, is_new=False)
  changes = {key: value for key, value in flatten(again).items() if value != flatten(first)[key]}
  assert changes == {"tokenizer_path": f"{runs}/new/tokenizer/tokenizer.json"}


def test_both_names_of_a_start_are_refused(runs, parent):
  with pytest.raises(UserError, match="both name the parameters"):
    start(runs, "from_run=parent", f"load_parameters_path={HF}")


@pytest.mark.parametrize("which", ["-1", "last", "1.5", ""])
def test_load_checkpoint_is_a_step_or_a_name(which):
  with pytest.raises(UserError, match=r"load_checkpoint=.* is no step"):
    load_config([f"load_checkpoint={which}"])
  assert load_config(["load_checkpoint=60"]).checkpoint.load_checkpoint == "60"


def test_a_resolved_config_keeps_its_keys(runs):
  """A `Config` of Python that differs from the folder is refused later, not replaced."""
  cfg = start(runs, f"load_parameters_path={HF}", "dataset_type=synthetic")
  wider = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, base_mlp_dim=64))
  assert change_config(wider, {}).model == wider.model
  taken = change_config(wider, {"load_parameters_path": HF})
  assert taken.model == cfg.model
