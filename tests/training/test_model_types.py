"""All models of a run compute in the run's types, whatever the types of their folders."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from preference_pairs import PAIRS, draw_pairs, packed
from safetensors.numpy import load_file, save_file
from support.saved_models import save_run
from support.slow_cases import slow
from support.tiny import KEYS, ROWS, VOCAB, build, config_of, place

import maxlite
from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.config.schema import DEFAULTS
from maxlite.hf.hf_config import model_keys
from maxlite.training.feature import find_feature
from maxlite.training.features.reference import Reference
from maxlite.training.model_weights import read_parameters

FIXTURES = Path(__file__).resolve().parents[1] / "hf" / "hf_fixtures"
TYPES = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16}


def folder_of(path, family, stored):
  """A copy of a fixture with weights of the type `stored`, and the tiny models' vocabulary."""
  shutil.copytree(FIXTURES / family, path)
  config = json.loads((path / "config.json").read_text())
  (path / "config.json").write_text(json.dumps(config | {"vocab_size": VOCAB}))
  tensors = load_file(path / "model.safetensors")
  for name in ("model.embed_tokens.weight", "lm_head.weight"):
    tensors[name] = np.resize(tensors[name], (VOCAB, config["hidden_size"]))
  tensors = {name: array.astype(TYPES[stored]) for name, array in tensors.items()}
  save_file(tensors, path / "model.safetensors")
  return path


def program_of(folder, **keys):
  """(config, program) of DPO on one device; policy and reference are the model in `folder`."""
  own = {}
  for name, value in model_keys(folder)[1].items():
    if name in KEYS or value != DEFAULTS[name]:
      own[name] = value
  paths = {"load_parameters_path": folder, "reference_path": folder}
  more = {"scan_layers": True, "per_device_batch_size": ROWS}
  cfg = config_of(**PAIRS | own | paths | more | keys)
  return cfg, build(cfg, jax.devices()[:1])


@pytest.mark.parametrize(
  ("stored", "keys"),
  [
    slow("F16", {}),
    slow("BF16", {}),
    ("F32", {"weight_dtype": "bfloat16"}),  # which rounds
    slow("F32", {}),
    slow("F32", {"dtype": "bfloat16"}),
    slow("F16", {"dtype": "bfloat16", "weight_dtype": "bfloat16"}),
    slow("BF16", {"quantization": "int8", "dtype": "bfloat16"}),
  ],
)
def test_a_policy_equal_to_its_reference_has_no_margin(tmp_path, stored, keys):
  cfg, program = program_of(folder_of(tmp_path / "hf", "llama", stored), **keys)
  reference = find_feature(program.features, Reference)
  sum_pairs = reference.build_eval_step(program.model)
  sums = sum_pairs(read_parameters(cfg, program), place(program, packed(draw_pairs(0))))["pairs"]
  assert sums.pairs > 1
  assert (sums.rewards_chosen, sums.rewards_rejected) == (0, 0)


def test_a_run_of_other_types_is_an_exact_reference(tmp_path):
  folder = folder_of(tmp_path / "hf", "llama", "F32")
  cfg, trained = program_of(folder, dtype="bfloat16", weight_dtype="bfloat16")
  save_run(tmp_path / "run", read_parameters(cfg, trained), cfg)
  paths = {"load_parameters_path": tmp_path / "run", "reference_path": tmp_path / "run"}
  cfg, program = program_of(folder, dtype="float32", weight_dtype="float32", **paths)
  reference = find_feature(program.features, Reference)
  assert reference.model.dtype == "float32"
  (params,) = reference.inputs()["reference"]
  for path, leaf in leaves_by_path(read_parameters(cfg, program)).items():
    np.testing.assert_array_equal(leaf, leaves_by_path(params)[path].astype(leaf.dtype))


def test_parameters_have_the_types_of_the_run(tmp_path):
  folder = folder_of(tmp_path / "hf", "deepseek_v3", "F32")
  cfg, program = program_of(folder, weight_dtype="bfloat16")
  wanted = leaves_by_path(program.abstract_state.params)
  # The bias that balances experts has 32 bits in every run.
  assert {leaf.dtype.name for leaf in wanted.values()} == {"float32", "bfloat16"}
  for path, leaf in leaves_by_path(read_parameters(cfg, program)).items():
    assert leaf.dtype == wanted[path].dtype, path


@pytest.mark.parametrize(("stored", "dtype"), [("F16", "float32"), ("BF16", "bfloat16")])
def test_loaded_weights_are_exact(tmp_path, stored, dtype):
  folder = folder_of(tmp_path / "hf", "llama", stored)
  model, params = maxlite.load(folder)
  assert (model.cfg.dtype, model.cfg.weight_dtype) == (dtype, dtype)
  tensors = load_file(folder / "model.safetensors")
  found = np.asarray(leaves_by_path(params)["embed/embedding"])
  np.testing.assert_array_equal(
    found.astype(np.float32), tensors["model.embed_tokens.weight"].astype(np.float32)
  )
