"""The text models in folders of models that read images or sound too."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from hf_measure import FIXTURES, as_numpy
from safetensors.numpy import load_file, save_file
from support.slow_cases import fast_only

import maxlite
from maxlite.config.schema import DEFAULTS, ModelConfig, build
from maxlite.errors import UserError
from maxlite.hf.conversion import from_hf
from maxlite.hf.families import FAMILIES
from maxlite.hf.hf_checkpoint import params_from_hf
from maxlite.hf.hf_config import model_keys
from maxlite.hf.load_model import abstract_params

NESTED = {name: family.nested_in for name, family in FAMILIES.items() if family.nested_in}
every_nested = pytest.mark.parametrize("model_type", NESTED)
VISION = np.ones((2, 3), np.float32)
TOKENS_BT = np.arange(24, dtype=np.int32).reshape(2, 12)


def nested_folder(model_type, folder, **others):
  """Write the fixture of `model_type` as a part of a larger model, with `others` in config.json."""
  folder.mkdir()
  text = json.loads((FIXTURES / model_type / "config.json").read_text())
  config = {"model_type": NESTED[model_type], "text_config": text, "vision_config": {"depth": 2}}
  config |= {"image_token_id": 7, "tie_word_embeddings": text["tie_word_embeddings"]} | others
  (folder / "config.json").write_text(json.dumps(config))
  tensors = {"model.visual.merger.weight": VISION}
  for name, tensor in load_file(FIXTURES / model_type / "model.safetensors").items():
    tensors[name.replace("model.", "model.language_model.", 1)] = tensor
  save_file(tensors, folder / "model.safetensors")
  return folder


def arrays_of(folder):
  family, keys = model_keys(folder)
  model = build(ModelConfig, DEFAULTS | keys)
  found = params_from_hf(folder, family, model, model.vocab_size, abstract_params(model))
  return {path: as_numpy(chunked) for path, chunked in found.items()}


def assert_same_arrays(folder, fixture):
  arrays = arrays_of(folder)
  expected = arrays_of(fixture)
  assert arrays.keys() == expected.keys()
  for path, array in arrays.items():
    np.testing.assert_array_equal(array, expected[path], path)


@pytest.mark.parametrize("model_type", fast_only(NESTED, "qwen3_5_moe_text"))
def test_the_text_model_of_a_larger_model_is_that_model(model_type, tmp_path):
  folder = nested_folder(model_type, tmp_path / "larger")
  assert model_keys(folder)[1] == model_keys(FIXTURES / model_type)[1]
  assert_same_arrays(folder, FIXTURES / model_type)


def test_import_names_the_parts_that_it_leaves_out(tmp_path):
  folder = nested_folder("gemma4_text", tmp_path / "larger")
  argv = [f"base_output_directory={tmp_path}", "run_name=run", "dataset_type=synthetic"]
  assert "only the text model, without model.visual" in from_hf(str(folder), argv)


@pytest.mark.parametrize(
  ("others", "message"),
  [
    ({"num_wings": 2}, "has num_wings beside text_config"),
    ({"text_config": None}, "has text_config=None, not an object"),
    ({"text_config": {"model_type": "llama"}}, "model_type='llama' in text_config"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings=False, but True in text_config"),
  ],
)
def test_a_larger_model_with_another_function_is_refused(others, message, tmp_path):
  folder = nested_folder("gemma4_text", tmp_path / "larger", **others)
  with pytest.raises(UserError, match=message):
    model_keys(folder)


def test_experts_in_one_tensor_are_read(tmp_path):
  """As in the published weights of Qwen3.5."""
  folder = nested_folder("qwen3_5_moe_text", tmp_path / "larger")
  tensors = load_file(folder / "model.safetensors")
  fused = {name: array for name, array in tensors.items() if ".mlp.experts." not in name}
  layers = {name.partition(".mlp.experts.")[0] for name in tensors.keys() - fused.keys()}
  for layer in layers:
    of_experts = [name for name in tensors if name.startswith(f"{layer}.mlp.experts.")]
    rows = []
    columns = []
    for expert in range(len(of_experts) // 3):
      prefix = f"{layer}.mlp.experts.{expert}"
      gate = tensors[f"{prefix}.gate_proj.weight"]
      up = tensors[f"{prefix}.up_proj.weight"]
      rows.append(np.concatenate([gate, up]))
      columns.append(tensors[f"{prefix}.down_proj.weight"])
    fused[f"{layer}.mlp.experts.gate_up_proj"] = np.stack(rows)
    fused[f"{layer}.mlp.experts.down_proj"] = np.stack(columns)
  assert fused.keys() != tensors.keys()
  save_file(fused, folder / "model.safetensors")
  assert_same_arrays(folder, FIXTURES / "qwen3_5_moe_text")


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.skipif(
  not (find_spec("torch") and find_spec("transformers")),
  reason="needs torch and transformers: pip install -e .[hf]",
)
@every_nested
def test_logits_of_text_are_those_of_the_larger_model(model_type, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(FIXTURES.parents[2] / "tools" / "fixtures")
  sys.modules.pop("hf_parity", None)
  import hf_parity
  import torch

  assert hf_parity.LARGER[NESTED[model_type]] == model_type
  model = hf_parity.build(NESTED[model_type], seed=0)
  model.save_pretrained(tmp_path / "larger")
  with torch.no_grad():
    expected = model(input_ids=torch.tensor(TOKENS_BT).long(), use_cache=False).logits.numpy()
  ours, params = maxlite.load(tmp_path / "larger")
  logits = np.asarray(ours.apply(params, TOKENS_BT))
  assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
