"""An export of an untrained import has every key that was imported, with its value."""

import json
import shutil

import pytest
from config_variants import DYNAMIC, LLAMA3, LONGROPE, YARN, config_of
from conversion import converted
from hf_measure import FIXTURES
from safetensors.numpy import load_file, save_file
from support.slow_cases import slow

from maxlite.checkpoint.parameters import write_parameters
from maxlite.config.schema import DEFAULTS, ModelConfig, build
from maxlite.hf.families import FAMILIES
from maxlite.hf.hf_checkpoint import params_from_hf
from maxlite.hf.hf_config import exported_config, model_keys
from maxlite.hf.hf_tokenizer import byte_tokenizer
from maxlite.hf.load_model import abstract_params

LENGTH = 64  # max_position_embeddings of the fixtures
# Keys of older files, of other tools and of larger models that an export keeps.
OTHERS = {
  "torch_dtype": "float32",
  "transformers_version": "4.31.0",
  "use_cache": False,
  "initializer_range": 0.5,
  "pad_token_id": 3,
  "eos_token_id": [2, 7],
  "bos_token_id": None,
}


def folder_of(path, values, model_type="llama"):
  """A fixture's weights with another config.json."""
  path.mkdir(exist_ok=True)
  shutil.copyfile(FIXTURES / model_type / "model.safetensors", path / "model.safetensors")
  (path / "config.json").write_text(json.dumps(values))
  return path


def exported(folder, length=2 * LENGTH, is_trained=False, **changes):
  """The exported config.json of the import of `folder`, with changed keys of the model."""
  model = build(ModelConfig, DEFAULTS | model_keys(folder)[1] | changes)
  source = json.loads((folder / "config.json").read_text())
  return exported_config(model, source, length, is_trained=is_trained)[1]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_key_of_config_json_is_kept(model_type, tmp_path):
  values = config_of(model_type) | OTHERS
  expected = values
  if model_type == "kimi_k2":  # transformers has no class of this name
    expected = values | {"model_type": "deepseek_v3"}
  assert exported(folder_of(tmp_path / "hf", values, model_type)) == expected


@pytest.mark.parametrize(
  ("model_type", "change", "length"),
  [
    ("mistral", {"max_position_embeddings": 4096}, 4096),
    ("llama", {"max_position_embeddings": 131072, "rope_parameters": LLAMA3}, 131072),
    ("llama", {"rope_parameters": {"type": "linear", "factor": 2.0}}, LENGTH),
    ("llama", {"rope_parameters": {**YARN, "factor": 2.0}}, LENGTH),
    ("llama", {"rope_parameters": DYNAMIC}, LENGTH),
    (
      "phi3",
      {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
      LENGTH,
    ),
  ],
)
def test_the_context_length_is_kept(model_type, change, length, tmp_path):
  values = config_of(model_type) | change
  if "rope_parameters" in change:
    values["rope_parameters"] = {"rope_theta": 500.0} | change["rope_parameters"]
  folder = folder_of(tmp_path / "hf", values, model_type)
  assert values["max_position_embeddings"] == length
  assert exported(folder, length=2 * length) == values
  assert exported(folder, length=16, is_trained=True) == values
  longer = exported(folder, length=2 * length, is_trained=True)["max_position_embeddings"]
  # With these forms of the rotary embedding, the model depends on the length.
  is_fixed = change.get("rope_parameters") in (DYNAMIC, LONGROPE)
  assert longer == (length if is_fixed else 2 * length)


def test_a_changed_model_has_its_own_keys(tmp_path):
  values = config_of("gemma4_text")
  folder = folder_of(tmp_path / "hf", values, "gemma4_text")
  larger = {"vocab_size": 48, "vocab_size_per_layer_input": 48}
  assert exported(folder, vocab_size=48) == values | larger
  changed = exported(folder, rope_max_timescale=5.0)
  assert changed["rope_parameters"]["full_attention"]["rope_theta"] == 5.0
  assert changed["pad_token_id"] is None


@pytest.mark.parametrize("source", [None, {"model_type": "mamba"}, config_of("qwen3")])
def test_a_config_json_of_another_model_is_left_aside(source):
  model = build(ModelConfig, DEFAULTS | model_keys(FIXTURES / "llama")[1])
  family, hf, is_imported = exported_config(model, source, 24, is_trained=False)
  assert (family.model_type, is_imported) == ("llama", False)
  assert "initializer_range" not in hf
  # Without the key, a class with another default, such as SmolLM3's, refuses a small vocabulary.
  assert hf["pad_token_id"] is None


def test_the_text_model_of_a_larger_one_keeps_its_keys():
  text = config_of("gemma4_text")
  larger = {
    "model_type": "gemma4",
    "text_config": text,
    "eos_token_id": [1, 106],
    "boi_token_id": 5,
  }
  model = build(ModelConfig, DEFAULTS | model_keys(FIXTURES / "gemma4_text")[1])
  hf = exported_config(model, larger, 99, is_trained=False)[1]
  assert hf == text | {"eos_token_id": [1, 106]}


def jsons_of(folder):
  return {file.name: json.loads(file.read_text()) for file in folder.glob("*.json")}


@pytest.fixture
def with_tokenizer(tmp_path):
  """(root with the run `a`, the folder that it was imported from, which has a tokenizer)."""
  folder = folder_of(tmp_path / "hf", config_of("llama") | OTHERS | {"bos_token_id": 256})
  byte_tokenizer().save(str(folder / "tokenizer.json"))
  others = {
    "generation_config.json": {"eos_token_id": 9, "bos_token_id": 256, "top_k": 3},
    "tokenizer_config.json": {"eos_token": "<|end_of_text|>", "model_max_length": 99},
    "special_tokens_map.json": {"eos_token": "<|end_of_text|>"},
  }
  for name, content in others.items():
    (folder / name).write_text(json.dumps(content))
  shutil.copyfile("configs/chat/plain.jinja", folder / "chat_template.jinja")
  run = ["run_name=a", f"base_output_directory={tmp_path}/runs"]
  # The tokenizer has more tokens than the fixture, whose vocabulary is extended with zeros.
  assert converted(["from_hf", folder, *run, "vocab_size=320"], dataset_type="text") == 0
  return tmp_path, folder


def test_every_file_of_an_untrained_import_is_kept(with_tokenizer):
  root, folder = with_tokenizer
  out = root / "out"
  run = ["run_name=a", f"base_output_directory={root}/runs", f"output_path={out}"]
  assert converted(["to_hf", *run], dataset_type="text") == 0
  expected = jsons_of(folder)
  expected["config.json"]["vocab_size"] = 320
  assert jsons_of(out) == expected
  template = (folder / "chat_template.jinja").read_text()
  assert (out / "chat_template.jinja").read_text() == template


def test_a_trained_model_stops_where_its_conversations_end(with_tokenizer):
  root, folder = with_tokenizer
  out = root / "out"
  run = ["run_name=a", f"base_output_directory={root}/runs", f"output_path={out}"]
  family, keys = model_keys(folder)
  model = build(ModelConfig, DEFAULTS | keys | {"vocab_size": 320})
  params = params_from_hf(folder, family, model, 40, abstract_params(model))
  write_parameters(root / "runs" / "a" / "checkpoints" / "1", params)
  assert converted(["to_hf", *run, "max_target_length=32"], dataset_type="text") == 0
  expected = jsons_of(folder)
  # The answers of the template end at the tokenizer's eos, which the lists of ids lack.
  expected["config.json"] |= {"vocab_size": 320, "eos_token_id": [257, 9]}
  expected["generation_config.json"] |= {"eos_token_id": [257, 9]}
  assert jsons_of(out) == expected


@pytest.mark.parametrize("bias", ["bfloat16", slow("float32")])
def test_a_router_bias_keeps_its_type(tmp_path, bias):
  folder = folder_of(tmp_path / "hf", config_of("glm4_moe"), "glm4_moe")
  tensors = {}
  for name, array in load_file(folder / "model.safetensors").items():
    is_bias = name.endswith("e_score_correction_bias")
    tensors[name] = array.astype(bias if is_bias else "bfloat16")
  save_file(tensors, folder / "model.safetensors")
  run = ["run_name=a", f"base_output_directory={tmp_path}", "weight_dtype=bfloat16"]
  assert converted(["from_hf", folder, *run], dataset_type="synthetic") == 0
  command = ["to_hf", *run, f"output_path={tmp_path}/out"]
  assert converted(command, dataset_type="synthetic") == 0
  found = load_file(tmp_path / "out" / "model.safetensors")
  assert found.keys() == tensors.keys()
  for name, array in tensors.items():
    assert (found[name].dtype, found[name].tobytes()) == (array.dtype, array.tobytes()), name
