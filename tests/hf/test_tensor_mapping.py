"""Weights of every family are imported and exported bitwise, each element once."""

import json
import math
import shutil

import jax
import numpy as np
import pytest
from config_variants import Folder, config_of
from hf_measure import FIXTURES, as_numpy
from safetensors.numpy import load_file, save_file
from support.needs import needs_transformers
from support.slow_cases import fast_only

import maxlite
from maxlite.checkpoint import chunked_array
from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.chunked_array import to_array
from maxlite.config.model_families import MODELS
from maxlite.config.model_function import EXECUTION
from maxlite.config.schema import DEFAULTS, ModelConfig, build, flatten
from maxlite.hf.families import FAMILIES
from maxlite.hf.hf_checkpoint import params_from_hf, write_weights
from maxlite.hf.hf_config import find_family, model_keys
from maxlite.hf.load_model import HfWeights, abstract_params, program_of_model
from maxlite.hf.tensor_mapping import axis_layout

# Of the default tests: dense, fused and recurrent layers, latent attention, and experts.
FAST = ("deepseek_v3", "gpt_oss", "granitemoe", "llama", "phi3", "qwen3_5_moe_text", "smollm3")
every_family = pytest.mark.parametrize("model_type", FAMILIES)


@pytest.fixture
def small_chunks(monkeypatch):
  """Chunks of a few rows, so that tensors have many."""
  monkeypatch.setattr(chunked_array, "CHUNK_BYTES", 600)


def model_of(folder, **changes):
  """(family, model config, {path: abstract array}) of a fixture."""
  family, keys = model_keys(folder)
  model = build(ModelConfig, DEFAULTS | keys | changes)
  return family, model, abstract_params(model)


def arrays_of(folder, **changes):
  """{path: array} of a fixture, NaN where no chunk has data."""
  family, model, params = model_of(folder, **changes)
  vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
  found = params_from_hf(folder, family, model, vocab_size, params)
  return {path: as_numpy(stream) for path, stream in found.items()}


def copied(model_type, target, change):
  """Copy a fixture with `change` applied to {tensor: array}."""
  shutil.copytree(FIXTURES / model_type, target, dirs_exist_ok=True)
  tensors = load_file(target / "model.safetensors")
  save_file(change(tensors), target / "model.safetensors")
  return target


@pytest.mark.parametrize(
  ("notation", "shape", "theirs"),
  [
    ("d h c -> (h c) d", (2, 3, 4), (12, 2)),
    ("h c d -> d (h c)", (3, 4, 2), (2, 12)),
    ("g e d f -> e d (f g)", (2, 3, 4, 5), (3, 4, 10)),
    ("d -> d", (3,), (3,)),
    ("h c -> (h c*)", (2, 8), (16,)),
    ("d h c -> (h c*4) d", (2, 3, 8), (24, 2)),
  ],
)
def test_layouts_are_invertible(notation, shape, theirs):
  array = np.arange(math.prod(shape)).reshape(shape)
  tensor = axis_layout(notation).to_theirs(array)
  assert tensor.shape == theirs
  np.testing.assert_array_equal(axis_layout(notation).to_ours(tensor, shape), array)


def test_only_the_first_channels_of_a_head_are_pairs():
  array = axis_layout("h c -> (h c*4)").to_ours(np.arange(12), (2, 6))
  np.testing.assert_array_equal(array, [[0, 2, 1, 3, 4, 5], [6, 8, 7, 9, 10, 11]])


def test_gate_and_up_columns_alternate_if_f_precedes_g():
  gate = np.zeros((1, 2, 3))
  linear = np.ones((1, 2, 3))
  tensor = axis_layout("g e d f -> e d (f g)").to_theirs(np.stack([gate, linear]))
  np.testing.assert_array_equal(tensor[0, 0], [0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize("model_type", fast_only(FAMILIES, *FAST))
def test_weights_survive_the_round_trip_bitwise(model_type, tmp_path, small_chunks):
  folder = FIXTURES / model_type
  family, model, params = model_of(folder)
  arrays = arrays_of(folder)
  assert all(np.isfinite(array).all() for array in arrays.values())

  reads = []

  def read(path, index):
    reads.append(f"{path} {index}")
    return arrays[path][index]

  write_weights(tmp_path, family, model, params, read, shard_bytes=9_000)
  assert len(reads) == len(set(reads))
  assert len(list(tmp_path.glob("*.safetensors"))) > 1
  got = {}
  for file in tmp_path.glob("*.safetensors"):
    got |= load_file(file)
  want = load_file(folder / "model.safetensors")
  assert got.keys() == want.keys()
  for name, array in want.items():
    assert got[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("model_type", fast_only(FAMILIES, "apertus", "nemotron_h"))
def test_bfloat16_weights_in_several_files_survive_the_round_trip(model_type, tmp_path):
  folder = tmp_path / "model"
  in_bfloat16_shards(model_type, folder)
  weights = HfWeights(folder)
  assert weights.model.dtype == "bfloat16"
  family, model, params = model_of(folder, weight_dtype="bfloat16")
  arrays = arrays_of(folder, weight_dtype="bfloat16")
  exact = arrays_of(folder)
  for path, array in arrays.items():
    np.testing.assert_array_equal(array.astype(np.float32), exact[path], err_msg=path)
  out = tmp_path / "out"
  out.mkdir()
  write_weights(
    out, family, model, params, lambda path, index: arrays[path][index], shard_bytes=9_000
  )
  got = tensors_of(out)
  want = tensors_of(folder)
  assert got.keys() == want.keys()
  for name, array in want.items():
    # Of routers in float32, unless the run's source.json says otherwise.
    assert got[name].dtype == array.dtype or name.endswith("bias"), name
    assert got[name].astype(array.dtype).tobytes() == array.tobytes(), name


@pytest.mark.hf
@needs_transformers
@pytest.mark.parametrize("model_type", fast_only(FAMILIES, "apertus"))
def test_a_bfloat16_folder_in_several_files_is_what_transformers_reads(model_type, tmp_path):
  folder = Folder(model_type, tmp_path / "model")
  in_bfloat16_shards(model_type, folder.path)
  config = config_of(model_type)
  ours = folder.our_logits(config)
  assert ours.dtype == np.float32
  theirs = folder.their_logits(config)
  model, params = maxlite.load(folder.path, dtype="float32")
  exact = np.asarray(model.apply(params, folder.tokens_BT))
  scale = np.abs(theirs).max()
  assert np.abs(exact - theirs).max() < 1e-4 * scale
  # Where rounding changes which keys or experts a token has, its logits are others.
  assert np.abs(ours - theirs).mean() < 0.01 * scale


def in_bfloat16_shards(model_type, folder):
  """Write a fixture into `folder`, with rounded weights in three files and an index."""
  folder.mkdir(exist_ok=True)
  shutil.copyfile(FIXTURES / model_type / "config.json", folder / "config.json")
  (folder / "model.safetensors").unlink(missing_ok=True)
  tensors = load_file(FIXTURES / model_type / "model.safetensors")
  files = {}
  for number, (name, array) in enumerate(sorted(tensors.items())):
    shard = files.setdefault(f"model-{number % 3 + 1:05}-of-00003.safetensors", {})
    shard[name] = array.astype(jax.numpy.bfloat16)
  for file, shard in files.items():
    save_file(shard, folder / file, {"format": "pt"})
  index = {name: file for file, shard in files.items() for name in shard}
  text = json.dumps({"metadata": {}, "weight_map": index})
  (folder / "model.safetensors.index.json").write_text(text)


def tensors_of(folder):
  found = {}
  for file in folder.glob("*.safetensors"):
    found |= load_file(file)
  return found


@every_family
def test_configs_survive_the_round_trip(model_type):
  keys = model_keys(FIXTURES / model_type)[1]
  model = build(ModelConfig, DEFAULTS | keys)
  found, hf = find_family(model)  # possibly another with the same config.json
  keys = {"decoder_block": found.decoder_block} | found.config_from_hf(hf)
  again = build(ModelConfig, DEFAULTS | keys)
  same = {name for name, value in flatten(model).items() if flatten(again)[name] == value}
  assert set(flatten(model)) - EXECUTION <= same


def test_a_config_that_no_family_supports_raises():
  keys = model_keys(FIXTURES / "mixtral")[1]
  changes = (
    {"attn_logits_soft_cap": 1.0},
    {"router": "topk_softmax"},
    {"mlp_activations": ("relu",)},
  )
  for change in (*changes, {"mscale": 1.0, "rope_type": "yarn"}):
    with pytest.raises(ValueError, match=next(iter(change))):
      find_family(build(ModelConfig, DEFAULTS | keys | change))


def test_a_model_is_exported_however_it_was_computed():
  keys = model_keys(FIXTURES / "mixtral")[1]
  how = {"context_parallel_strategy": "ring", "remat_policy": "full", "sparse_matmul": False}
  unread = {"rope_type": "linear", "original_max_position_embeddings": 8}
  assert find_family(build(ModelConfig, DEFAULTS | keys | how | unread))[0].model_type == "mixtral"


def test_a_model_without_a_limit_of_activations_is_not_exported_with_the_limit_0():
  keys = model_keys(FIXTURES / "gpt_oss")[1] | {"mlp_activations_limit": 0.0}
  family, hf = find_family(build(ModelConfig, DEFAULTS | keys))
  assert hf["swiglu_limit"] == np.finfo(np.float16).max
  assert family.config_from_hf(hf)["mlp_activations_limit"] == 0


@pytest.mark.parametrize("local", [0.0, 50.0, 5000.0])
def test_the_local_rotary_base_is_exported_or_refused(local):
  change = {"rope_type": "default", "rope_max_timescale": 5000.0, "local_rope_max_timescale": local}
  models = {
    name: build(ModelConfig, DEFAULTS | model_keys(FIXTURES / name)[1] | change)
    for name in ("gemma2", "gemma3_text")
  }
  found, hf = find_family(models["gemma3_text"])
  exported = found.config_from_hf(hf)["local_rope_max_timescale"]
  assert exported == (50.0 if local == 50.0 else 0.0)
  if local == 50.0:
    with pytest.raises(ValueError, match="local_rope_max_timescale=50"):
      find_family(models["gemma2"])
  else:
    assert find_family(models["gemma2"])[0].model_type == "gemma2"


def test_unstacked_layers_get_the_same_weights(small_chunks):
  folder = FIXTURES / "deepseek_v2"
  stacked = arrays_of(folder)
  unstacked = arrays_of(folder, scan_layers=False)
  for path, array in stacked.items():
    top, _, rest = path.partition("/")
    if "layers" not in top:
      np.testing.assert_array_equal(unstacked[path], array)
    for i in range(len(array) if "layers" in top else 0):
      np.testing.assert_array_equal(unstacked[f"{top}_{i}/{rest}"], array[i])


def test_sharded_arrays_equal_unsharded_ones(small_chunks):
  folder = FIXTURES / "mixtral"
  family, model, _ = model_of(folder)
  mesh = {"fsdp": 2, "expert": 2, "tensor": 2}
  params = leaves_by_path(program_of_model(model, mesh).abstract_state.params)
  found = params_from_hf(folder, family, model, model.vocab_size, params)
  path = "layers/moe/wi_0"
  placed = to_array(found[path], params[path].sharding)
  assert placed.sharding == params[path].sharding
  assert placed.addressable_shards[0].data.size == placed.size / 8
  np.testing.assert_array_equal(placed, as_numpy(found[path]))


def test_a_larger_vocabulary_gets_rows_of_zeros(small_chunks):
  folder = FIXTURES / "llama"
  plain = arrays_of(folder)
  padded = arrays_of(folder, vocab_size=64)
  for path, axis in (("embed/embedding", 0), ("unembed/kernel", 1)):
    old, new = np.split(padded[path], [40], axis=axis)
    np.testing.assert_array_equal(old, plain[path])
    assert new.shape[axis] == 24
    assert not new.any()


def test_a_copy_of_a_tied_embedding_is_ignored_and_another_matrix_raises(tmp_path):
  def tied(folder, head):
    copied("llama", folder, lambda t: t | {"lm_head.weight": head(t["model.embed_tokens.weight"])})
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": True}
    (folder / "config.json").write_text(json.dumps(config))
    return folder

  assert "unembed/kernel" not in arrays_of(tied(tmp_path / "same", lambda e: e.copy()))
  with pytest.raises(
    ValueError, match=r"has lm_head.weight, which differs .*tie_word_embeddings=true"
  ):
    arrays_of(tied(tmp_path / "other", lambda e: e + 1))


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda t: {n: a for n, a in t.items() if n != NAME}, f"lacks 1 tensors: {NAME}"),
    (lambda t: t | {"model.layers.2.x": t[NAME]}, "has 1 tensors .*: model.layers.2.x"),
    (lambda t: t | {NAME: t[NAME].T.copy()}, rf"{NAME} of shape \[16, 24\], .* \[24, 16\]"),
    (lambda t: t | {NAME: t[NAME].astype(np.int32)}, f"{NAME} of type I32"),
    (lambda t: t | {NAME: t[NAME].astype(np.float64)}, f"{NAME} of type F64"),
  ],
)
def test_weights_of_another_model_raise_with_a_name(tmp_path, change, message):
  with pytest.raises(ValueError, match=message) as caught:
    arrays_of(copied("llama", tmp_path, change))
  assert "\n" not in str(caught.value)


def test_buffers_without_weights_are_ignored(tmp_path):
  name = "model.layers.0.self_attn.rotary_emb.inv_freq"
  arrays_of(copied("llama", tmp_path, lambda t: t | {name: np.ones(2, np.float32)}))


def test_half_precision_is_read_as_either_dtype(tmp_path):
  def half(t):
    return {name: array.astype(np.float16) for name, array in t.items()}

  folder = copied("llama", tmp_path, half)
  want = load_file(folder / "model.safetensors")["model.norm.weight"]
  got = arrays_of(folder)["final_norm/scale"]
  assert got.dtype == np.float32
  np.testing.assert_array_equal(got, want.astype(np.float32))
  rounded = arrays_of(folder, weight_dtype="bfloat16")["final_norm/scale"]
  assert rounded.dtype == jax.numpy.bfloat16


def test_every_decoder_block_has_a_family():
  blocks = set()
  for family in FAMILIES.values():
    blocks |= {family.decoder_block, *family.variants}
  assert blocks == set(MODELS)


def test_a_variant_of_a_family_is_exported_as_itself():
  keys = model_keys(FIXTURES / "glm4_moe")[1] | {"decoder_block": "glm4_moe_air"}
  family, hf = find_family(build(ModelConfig, DEFAULTS | keys))
  assert (family.model_type, hf["use_qk_norm"]) == ("glm4_moe", False)
  assert family.config_from_hf(hf)["decoder_block"] == "glm4_moe_air"
