"""The text models in folders of models that read images or sound too."""

import json
import sys

import numpy as np
import pytest
from hf_measure import FIXTURES, as_numpy
from safetensors.numpy import load_file, save_file
from support.needs import needs_transformers
from support.slow_cases import fast_only

import maxlite
from maxlite.config.schema import DEFAULTS, ModelConfig, build
from maxlite.errors import UserError
from maxlite.hf.conversion import from_hf
from maxlite.hf.hf_checkpoint import params_from_hf
from maxlite.hf.hf_config import exported_config, model_keys
from maxlite.hf.load_model import abstract_params
from maxlite.hf.text_model import LARGER_MODELS

# The larger model of each model_type that a text_config may have, and the family of the text model.
NESTED = {}
FAMILY_OF = {}
for _name, _larger in LARGER_MODELS.items():
  NESTED |= dict.fromkeys(_larger.families, _name)
  FAMILY_OF |= _larger.families
VISION = np.ones((2, 3), np.float32)
TOKENS_BT = np.arange(24, dtype=np.int32).reshape(2, 12)


# The names of tensors of text models: of transformers since 4.52, before, and of Qwen2-VL then.
NEWER = {"model.": "model.language_model.", "lm_head.": "lm_head."}
OLDER = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
FLAT = {"model.": "model.", "lm_head.": "lm_head."}


# As hf_parity.py names them, with the model_type of the text model after a slash.
TRANSFORMERS = (*LARGER_MODELS, "mistral3/ministral3", "mistral3/mistral4")


def nested_folder(model_type, folder, names=NEWER, **others):
  """Write the fixture of a text model as a part of a larger model, with `others` in config.json."""
  folder.mkdir()
  fixture = FIXTURES / FAMILY_OF[model_type]
  text = json.loads((fixture / "config.json").read_text()) | {"model_type": model_type}
  config = {"model_type": NESTED[model_type], "text_config": text, "vision_config": {"depth": 2}}
  config |= {"image_token_id": 7, "tie_word_embeddings": text["tie_word_embeddings"]} | others
  (folder / "config.json").write_text(json.dumps(config))
  vision = "model.visual.merger.weight" if names is NEWER else "visual.merger.weight"
  tensors = {vision: VISION}
  for name, tensor in load_file(fixture / "model.safetensors").items():
    prefix = name.partition(".")[0] + "."
    tensors[names.get(prefix, prefix) + name.removeprefix(prefix)] = tensor
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


@pytest.mark.parametrize("model_type", fast_only(NESTED, "mistral", "qwen3_5_moe_text"))
def test_the_text_model_of_a_larger_model_is_that_model(model_type, tmp_path):
  fixture = FIXTURES / FAMILY_OF[model_type]
  for number, names in enumerate((NEWER, OLDER, FLAT)):
    folder = nested_folder(model_type, tmp_path / str(number), names)
    assert model_keys(folder)[1] == model_keys(fixture)[1]
    assert_same_arrays(folder, fixture)


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


def test_a_soft_cap_that_the_larger_model_does_not_apply_is_refused(tmp_path):
  """transformers caps the logits of gemma3_text, but not those of gemma3."""
  text = json.loads((FIXTURES / "gemma3_text" / "config.json").read_text())
  text |= {"final_logit_softcapping": 0.5}
  folder = nested_folder("gemma3_text", tmp_path / "larger", text_config=text)
  with pytest.raises(UserError, match=r"final_logit_softcapping=0.5 in text_config"):
    model_keys(folder)


def test_experts_in_one_tensor_are_read(tmp_path):
  """As in the published weights of Qwen3.5."""
  folder = nested_folder("qwen3_5_moe_text", tmp_path / "larger")
  tensors = load_file(folder / "model.safetensors")
  save_file(fused(tensors), folder / "model.safetensors")
  assert_same_arrays(folder, FIXTURES / "qwen3_5_moe_text")


@pytest.mark.parametrize("is_transposed", [True, False])
def test_a_fused_tensor_of_experts_is_told_from_its_transpose(is_transposed, tmp_path):
  """Qwen3-VL's experts are published as the transpose of what transformers saves."""
  folder = nested_folder("qwen3_vl_moe_text", tmp_path / "larger")
  tensors = fused(load_file(folder / "model.safetensors"))
  for name, array in tensors.items():
    if is_transposed and ".mlp.experts." in name:
      tensors[name] = np.ascontiguousarray(array.swapaxes(1, 2))
  save_file(tensors, folder / "model.safetensors")
  assert_same_arrays(folder, FIXTURES / "qwen3_moe")


def fused(tensors):
  """The tensors with one for all experts of a layer in place of one for each expert."""
  result = {name: array for name, array in tensors.items() if ".mlp.experts." not in name}
  layers = {name.partition(".mlp.experts.")[0] for name in tensors.keys() - result.keys()}
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
    result[f"{layer}.mlp.experts.gate_up_proj"] = np.stack(rows)
    result[f"{layer}.mlp.experts.down_proj"] = np.stack(columns)
  assert layers
  return result


def kimi_folder(folder):
  """Write a folder as Kimi-K2.5 is published: names and keys."""
  return nested_folder(
    "kimi_k2",
    folder,
    OLDER,
    ignore_index=-100,
    media_placeholder_token_id=7,
    use_unified_vision_chunk=True,
    video_placeholder="<video>",
  )


def test_a_published_kimi_folder_is_read_as_its_text_model(tmp_path):
  folder = kimi_folder(tmp_path / "larger")
  assert_same_arrays(folder, FIXTURES / "kimi_k2")
  # transformers 5.23 saves its layers under another name.
  tensors = load_file(folder / "model.safetensors")
  renamed = {name.replace(".layers.", ".blocks."): array for name, array in tensors.items()}
  assert renamed.keys() != tensors.keys()
  save_file(renamed, folder / "model.safetensors")
  assert_same_arrays(folder, FIXTURES / "kimi_k2")


def test_experts_that_text_config_describes_as_packed_are_unpacked(tmp_path):
  folder = kimi_folder(tmp_path / "larger")
  tensors = load_file(folder / "model.safetensors")
  (name,) = (name for name in tensors if name.endswith("layers.1.mlp.experts.0.up_proj.weight"))
  shape = tensors.pop(name).shape
  tensors |= {
    f"{name}_packed": np.full((shape[0], shape[1] // 8), 0x7B7B7B7B, np.int32),  # 11 - 8, 7 - 8
    f"{name}_scale": np.full((shape[0], 1), 0.5, np.float32),
    f"{name}_shape": np.array(shape, np.int64),
  }
  save_file(tensors, folder / "model.safetensors")
  weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
  config = json.loads((folder / "config.json").read_text())
  config["text_config"]["quantization_config"] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": weights}},
  }
  (folder / "config.json").write_text(json.dumps(config))
  expert_FD = arrays_of(folder)["layers/moe/wi_1"][0, 0].T
  np.testing.assert_array_equal(expert_FD, np.tile([1.5, -0.5], (shape[0], shape[1] // 2)))


def qwen2_vl_folder(folder, is_flat):
  """Write a folder as published: flat, or with text_config."""
  folder = nested_folder("qwen2_vl_text", folder, FLAT, tie_word_embeddings=True)
  config = json.loads((folder / "config.json").read_text())
  text = config["text_config"] | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}
  for name in ("rope_parameters", "rope_theta", "rms_norm_eps", "model_type"):
    text.pop(name, None)  # of which the class of the larger model has other defaults than Qwen2
  config["text_config"] = text
  if is_flat:
    config |= text
    del config["text_config"]
  (folder / "config.json").write_text(json.dumps(config))
  return folder


@pytest.mark.parametrize("is_flat", [False, True])
def test_missing_keys_have_the_defaults_of_the_larger_model(is_flat, tmp_path):
  folder = qwen2_vl_folder(tmp_path / "larger", is_flat)
  family, keys = model_keys(folder)
  assert family.model_type == "qwen2"
  assert keys["logits_via_embedding"]
  assert (keys["rope_type"], keys["rope_max_timescale"]) == ("default", 1e6)
  assert keys["normalization_layer_epsilon"] == 1e-5
  model = build(ModelConfig, DEFAULTS | keys)
  source = json.loads((folder / "config.json").read_text())
  family, hf, is_imported = exported_config(model, source, 64, is_trained=False)
  assert (family.model_type, is_imported) == ("qwen2", True)
  assert (hf["model_type"], hf["rope_theta"], hf["rms_norm_eps"]) == ("qwen2", 1e6, 1e-5)
  assert "vision_config" not in hf
  assert family.config_from_hf(hf) | {"decoder_block": "qwen2"} == keys | {"decoder_block": "qwen2"}


@pytest.mark.hf
@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize("larger", TRANSFORMERS)
def test_logits_of_text_are_those_of_the_larger_model(larger, tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(FIXTURES.parents[2] / "tools" / "fixtures")
  sys.modules.pop("hf_parity", None)
  import hf_parity
  import torch

  assert hf_parity.LARGER[larger] in LARGER_MODELS[larger.partition("/")[0]].families
  model = hf_parity.build(larger, seed=0)
  model.save_pretrained(tmp_path / "larger")
  with torch.no_grad():
    expected = model(input_ids=torch.tensor(TOKENS_BT).long(), use_cache=False).logits.numpy()
  ours, params = maxlite.load(tmp_path / "larger")
  logits = np.asarray(ours.apply(params, TOKENS_BT))
  assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
