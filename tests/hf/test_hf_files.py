"""Hugging Face files: compatible with the safetensors library, and validated before use."""

import json
import shutil

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_measure import FIXTURES
from safetensors.numpy import load_file, save_file
from support.slow_cases import slow

import maxlite
from maxlite.errors import UserError
from maxlite.hf.families import FAMILIES
from maxlite.hf.hf_config import model_keys
from maxlite.hf.hf_folder import DTYPES, FolderWriter, read_header, read_tensors

BF16 = np.dtype(jnp.bfloat16)
ARRAYS = {
  "a": np.arange(24, dtype=np.float32).reshape(4, 6),
  "b.weight": np.linspace(-2, 2, 35).reshape(5, 7).astype(BF16),
  "c": np.arange(3, dtype=np.float16),
}
SPECS = {name: (array.dtype, array.shape) for name, array in ARRAYS.items()}


def write(folder, **options):
  """Write ARRAYS row by row in reverse order."""
  writer = FolderWriter(folder, SPECS, **options)
  for name in reversed(ARRAYS):
    for row in reversed(range(len(ARRAYS[name]))):
      writer.write_rows(name, row, ARRAYS[name][row : row + 1])
  writer.close()


def values(folder):
  return {name: t.read_rows(0, t.shape[0]) for name, t in read_tensors(folder).items()}


def assert_arrays(found):
  assert found.keys() == ARRAYS.keys()
  for name, array in ARRAYS.items():
    assert (found[name].dtype, found[name].shape) == SPECS[name]
    assert found[name].tobytes() == array.tobytes()


def test_the_library_reads_written_files(tmp_path):
  write(tmp_path)
  assert_arrays(load_file(tmp_path / "model.safetensors"))


def test_files_of_the_library_are_read(tmp_path):
  save_file(ARRAYS, tmp_path / "model.safetensors")
  assert_arrays(values(tmp_path))
  part = read_tensors(tmp_path)["b.weight"].read_rows(1, 3)
  np.testing.assert_array_equal(part, ARRAYS["b.weight"][1:3])


def test_files_are_split_by_size_and_indexed(tmp_path):
  write(tmp_path, shard_bytes=100)
  index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
  assert len(set(index["weight_map"].values())) == 2
  assert index["metadata"]["total_size"] == sum(a.nbytes for a in ARRAYS.values())
  assert_arrays(values(tmp_path))


def change_index(folder, change):
  path = folder / "model.safetensors.index.json"
  index = json.loads(path.read_text())
  change(index["weight_map"])
  path.write_text(json.dumps(index))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda m: m.pop("c"), "has unexpected tensors, .*: c"),
    (lambda m: m.update(a="../outside.safetensors"), "names the file '../outside.safetensors'"),
    (lambda m: m.update(a="/etc/passwd"), "names the file '/etc/passwd'"),
    (lambda m: m.update(a=".."), "names the file '..'"),
    (lambda m: m.update(a="gone.safetensors"), "names the file 'gone.safetensors'"),
    (lambda m: m.update(a=7), 'no "weight_map"'),
  ],
)
def test_an_inconsistent_index_raises_one_line(tmp_path, change, message):
  folder = tmp_path / "model"
  folder.mkdir()
  write(folder, shard_bytes=100)
  shutil.copyfile(next(folder.glob("*.safetensors")), tmp_path / "outside.safetensors")
  change_index(folder, change)
  with pytest.raises(ValueError, match=message) as caught:
    read_tensors(folder)
  assert "\n" not in str(caught.value)


def test_entries_of_an_index_without_a_tensor_are_ignored(tmp_path):
  """As of layers that were removed after the index was written; transformers ignores them too."""
  write(tmp_path, shard_bytes=100)
  change_index(tmp_path, lambda names: names.update(d=names["a"]))
  assert_arrays(values(tmp_path))


def test_a_model_that_needs_a_tensor_of_the_index_alone_is_refused(tmp_path):
  folder = shutil.copytree(FIXTURES / "llama", tmp_path / "model")
  tensors = load_file(folder / "model.safetensors")
  (folder / "model.safetensors").unlink()
  lacking, *others = tensors
  save_file({name: tensors[name] for name in others}, folder / "a.safetensors")
  file_of = dict.fromkeys(tensors, "a.safetensors")
  (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
  with pytest.raises(ValueError, match=f"lacks 1 tensors: {lacking}"):
    maxlite.load(folder)


def test_files_in_subfolders_are_read(tmp_path):
  write(tmp_path, shard_bytes=100)
  (tmp_path / "weights" / "of").mkdir(parents=True)
  for shard in tmp_path.glob("*.safetensors"):
    shard.rename(tmp_path / "weights" / "of" / shard.name)
  change_index(tmp_path, lambda m: m.update({name: f"weights/of/{m[name]}" for name in m}))
  assert_arrays(values(tmp_path))


@pytest.mark.parametrize(
  "text", ["", "{", "[]", "[" * 100_000, '"x"', "\xff", '{"weight_map": []}']
)
def test_an_invalid_index_raises(tmp_path, text):
  write(tmp_path, shard_bytes=100)
  (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin1"))
  with pytest.raises(ValueError, match="copy it again"):
    read_tensors(tmp_path)


def test_a_file_beside_shards_of_other_weights_raises(tmp_path):
  write(tmp_path, shard_bytes=100)
  (shard, *_) = tmp_path.glob("*.safetensors")
  shutil.copyfile(shard, tmp_path / "model.safetensors")
  with pytest.raises(ValueError, match=r"has model\.safetensors and, without it, .*index\.json"):
    read_tensors(tmp_path)


def test_an_adapter_beside_the_weights_raises(tmp_path):
  folder = shutil.copytree(FIXTURES / "llama", tmp_path / "model")
  (folder / "adapter_config.json").write_text("{}")
  with pytest.raises(ValueError, match=r"has adapter_config\.json beside .*from_peft"):
    maxlite.load(folder)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "qwen3_next"])
def test_weights_without_an_output_projection_have_no_prefix(tmp_path, model_type):
  folder = shutil.copytree(FIXTURES / model_type, tmp_path / "model")
  tensors = load_file(folder / "model.safetensors")
  base = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
  save_file(base, folder / "model.safetensors")
  assert values(folder).keys() == tensors.keys()
  for name, array in values(folder).items():
    np.testing.assert_array_equal(array, tensors[name])


def test_a_constant_of_xielu_with_another_value_raises(tmp_path):
  folder = shutil.copytree(FIXTURES / "apertus", tmp_path / "apertus")
  tensors = load_file(folder / "model.safetensors")
  name = "model.layers.1.mlp.act_fn.beta"
  assert tensors[name] == 0.5
  save_file(tensors | {name: np.array(0.25, np.float32)}, folder / "model.safetensors")
  with pytest.raises(UserError, match=r"layers.1.mlp.act_fn.beta=0.25, .* only 0.5"):
    maxlite.load(folder)


@pytest.mark.parametrize("model_type", ["gpt2", slow("gpt_neox")])
def test_published_names_without_a_prefix_and_masks_are_read(tmp_path, model_type):
  """As in the published files of GPT-2, which have masks, and so have those of Pythia."""
  folder = shutil.copytree(FIXTURES / model_type, tmp_path / "model")
  _, expected = maxlite.load(folder)
  tensors = load_file(folder / "model.safetensors")
  prefix = FAMILIES[model_type].base_prefix
  base = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
  layer = FAMILIES[model_type].layer_prefix.format(layer=0).removeprefix(prefix)
  module = "attn" if model_type == "gpt2" else "attention"
  base[f"{layer}{module}.bias"] = np.tril(np.ones((1, 1, 32, 32), np.float32))
  base[f"{layer}{module}.masked_bias"] = np.array(-1e4, np.float32)
  save_file(base, folder / "model.safetensors")
  _, params = maxlite.load(folder)
  jax.tree.map(np.testing.assert_array_equal, params, expected)
  extra = base | {f"{layer}{module}.other": np.ones(2, np.float32)}
  save_file(extra, folder / "model.safetensors")
  with pytest.raises(UserError, match="has 1 tensors that model_type"):
    maxlite.load(folder)


def packed(header, num_bytes=8, length=None):
  """Content of a file with this header and `num_bytes` bytes of data."""
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  length = len(text) if length is None else length
  return length.to_bytes(8, "little") + text + bytes(num_bytes)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"1234567",
    packed({"a": ENTRY}, length=2**63),
    packed({"a": ENTRY}, length=2**62, num_bytes=100),
    packed({"a": ENTRY}, length=10),
    packed(b"no json at all"),
    packed(b"[1, 2]"),
    packed({"a": ENTRY}, num_bytes=7),
    packed({"a": ENTRY}, num_bytes=9),
    packed({"a": ENTRY | {"shape": [3]}}),
    packed({"a": ENTRY | {"shape": [2**40, 2**40]}}),
    packed({"a": ENTRY | {"shape": [-2]}}),
    packed({"a": ENTRY | {"dtype": "F33"}}),
    packed({"a": ENTRY | {"data_offsets": [8, 0]}}),
    packed({"a": ENTRY | {"data_offsets": [8, 16]}}, num_bytes=16),
    packed({"a": ENTRY, "b": ENTRY}),
    packed({"a": {}}),
  ],
)
def test_an_invalid_file_raises_one_line(tmp_path, content):
  (tmp_path / "model.safetensors").write_bytes(content)
  with pytest.raises(ValueError, match="not a complete safetensors file") as caught:
    read_tensors(tmp_path)
  assert "\n" not in str(caught.value)


@hypothesis.settings(max_examples=150, deadline=None, database=None)
@hypothesis.given(st.integers(0, 511), st.integers(0, 255), st.integers(0, 600))
def test_damage_is_detected_or_affects_only_values(tmp_path_factory, where, byte, length):
  folder = tmp_path_factory.getbasetemp() / "damaged"
  folder.mkdir(exist_ok=True)
  path = folder / "model.safetensors"
  save_file(ARRAYS, path)
  content = bytearray(path.read_bytes())
  content[where % len(content)] = byte
  path.write_bytes(content[:length] if length < len(content) else content)
  message = error_of(lambda: read_header(path))
  assert not message or "not a complete safetensors file" in message
  for tensor in () if message else read_header(path).values():
    if tensor.dtype in DTYPES:
      assert tensor.read_rows(0, tensor.shape[0]).shape == tensor.shape


def error_of(read):
  try:
    read()
  except ValueError as error:
    return str(error)
  return ""


def test_a_file_truncated_after_validation_raises(tmp_path):
  save_file(ARRAYS, tmp_path / "model.safetensors")
  tensor = read_tensors(tmp_path)["a"]
  (tmp_path / "model.safetensors").write_bytes(b"short")
  with pytest.raises(ValueError, match="ends 96 bytes early"):
    tensor.read_rows(0, 4)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
  folder = tmp_path_factory.mktemp("llama") / "model"
  shutil.copytree(FIXTURES / "llama", folder)
  return folder


def keys_of(llama, config):
  (llama / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
  return model_keys(llama)[1]


ZERO_LENGTH = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 0}
CONFIG = json.loads((FIXTURES / "llama" / "config.json").read_text())


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"model_type": "mamba"}, "model_type='mamba'; supported are llama, "),
    ({"model_type": ["llama"]}, "supported are llama, "),
    ({"hidden_size": "wide"}, "hidden_size=wide"),
    ({"hidden_size": None}, "hidden_size=null, which has no meaning: remove it for the default"),
    ({"hidden_size": 10**30}, "hidden_size=1000"),
    ({"hidden_size": 2**30}, "there are .* weights in all"),
    ({"num_hidden_layers": 2**30}, "there are .* weights in all"),
    ({"num_hidden_layers": -1}, "num_hidden_layers=-1"),
    ({"num_hidden_layers": 10**6}, "there are .* weights in all, in .* tensors"),
    ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
    ({"rope_theta": 0, "rope_parameters": None}, "rope_theta=0"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0"),
    ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads=0"),
    ({"num_attention_heads": 3}, "num_attention_heads=3 with num_key_value_heads=2: query heads"),
    ({"intermediate_size": 0}, "intermediate_size=0 is below 1"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps=-1e-06 is below 0"),
    ({"tie_word_embeddings": 0}, "tie_word_embeddings=0 is not true or false"),
    ({"rope_parameters": ZERO_LENGTH}, "original_max_position_embeddings=0"),
    ({"rms_norm_eps": "tiny"}, "rms_norm_eps=tiny"),
    ({"hidden_act": "cos"}, "hidden_act='cos'"),
    ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
    ({"rope_parameters": "default"}, "config.json: "),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5, but maxlite supports only"),
    ({"rope_parameters": {"rope_theta": 5.0, "partial_rotary_factor": 0.5}}, "only partial_rotary"),
    ({"rope_parameters": {"mscale_all_dim": 1.0}}, "mscale_all_dim=1.0 for a rotary embedding"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ({"quantization_config": "fp8"}, "quantization_config"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size=None"),
  ],
)
def test_an_invalid_config_raises_one_line(llama, change, message):
  with pytest.raises(ValueError, match=message) as caught:
    keys_of(llama, CONFIG | change)
  assert "config.json" in str(caught.value)
  assert "\n" not in str(caught.value)


def test_a_config_without_a_key_that_has_no_default_raises(tmp_path):
  shutil.copytree(FIXTURES / "kimi_k2", tmp_path / "model")
  path = tmp_path / "model" / "config.json"
  config = json.loads(path.read_text())
  path.write_text(json.dumps({k: value for k, value in config.items() if k != "vocab_size"}))
  with pytest.raises(ValueError, match="lacks 'vocab_size'"):
    model_keys(tmp_path / "model")


@hypothesis.settings(max_examples=150, deadline=None, database=None)
@hypothesis.given(
  st.sampled_from(sorted(CONFIG)),
  st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
  ),
)
def test_any_value_is_read_or_raises_with_the_file_name(llama, name, value):
  message = error_of(lambda: keys_of(llama, CONFIG | {name: value}))
  assert not message or "config.json" in message
