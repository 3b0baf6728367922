"""Layers of multi-token prediction under their published names."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
from hf_measure import FIXTURES, as_numpy
from safetensors.numpy import load_file, save_file
from support.needs import needs_transformers
from support.slow_cases import fast_only

from maxlite.config.schema import DEFAULTS, ModelConfig, build
from maxlite.errors import UserError
from maxlite.hf.hf_checkpoint import params_from_hf, write_weights
from maxlite.hf.hf_config import find_family, model_keys
from maxlite.hf.load_model import abstract_params, load

# The published names of the tensors around the decoder layer, and their shapes for a width d.
LAYER = {
  "enorm.weight": "d",
  "hnorm.weight": "d",
  "eh_proj.weight": "d 2d",
  "shared_head.norm.weight": "d",
}
COPIES = {
  "embed_tokens.weight": "model.embed_tokens.weight",
  "shared_head.head.weight": "lm_head.weight",
}
QWEN = {
  "pre_fc_norm_embedding.weight": "d",
  "pre_fc_norm_hidden.weight": "d",
  "fc.weight": "d 2d",
  "norm.weight": "d",
}
MODEL_TYPES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_next", "qwen3_5_moe_text")


def is_qwen(model_type):
  return model_type.startswith("qwen")


def prefixes_of(model_type, num_layers):
  """(prefix of the tensors around the decoder layer, that of the decoder layer)."""
  if is_qwen(model_type):
    return "mtp.", "mtp.layers.0."
  return f"model.layers.{num_layers}.", f"model.layers.{num_layers}."


def publish(folder, model_type, **changes):
  """Make a folder of a model type with one layer, as it is published."""
  shutil.copytree(FIXTURES / model_type, folder)
  config = json.loads((folder / "config.json").read_text())
  if model_type == "qwen3_next":
    config.pop("num_nextn_predict_layers", None)  # published files do not have it
  elif is_qwen(model_type):
    config["mtp_num_hidden_layers"] = 1
  else:
    config["num_nextn_predict_layers"] = 1
  (folder / "config.json").write_text(json.dumps(config))
  tensors = load_file(folder / "model.safetensors")
  tensors |= layer_tensors(model_type, config, tensors) | changes
  save_file(tensors, folder / "model.safetensors")
  return folder


def layer_tensors(model_type, config, tensors):
  """The tensors of the layer, with the shapes of the decoder's last one."""
  num_layers = config["num_hidden_layers"]
  width = config["hidden_size"]
  draw = np.random.default_rng(0)
  prefix, block_prefix = prefixes_of(model_type, num_layers)
  last = f"model.layers.{num_layers - 1}."
  made = {}
  for name, tensor in tensors.items():
    if name.startswith(last):
      noise = 0.3 * draw.standard_normal(tensor.shape)
      made[block_prefix + name.removeprefix(last)] = (tensor + noise).astype(tensor.dtype)
  shapes = {"d": (width,), "d 2d": (width, 2 * width)}
  for name, shape in (QWEN if is_qwen(model_type) else LAYER).items():
    made[prefix + name] = draw.standard_normal(shapes[shape]).astype(np.float32)
  if not is_qwen(model_type):
    for name, original in COPIES.items():
      made[prefix + name] = tensors[original].copy()
  return made


def imported(folder, **changes):
  """(family, model config, {path: array}) of a folder."""
  family, keys = model_keys(folder)
  model = build(ModelConfig, DEFAULTS | keys | changes)
  vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
  found = params_from_hf(folder, family, model, vocab_size, abstract_params(model))
  return family, model, {path: as_numpy(stream) for path, stream in found.items()}


@pytest.mark.parametrize("model_type", fast_only(MODEL_TYPES, "deepseek_v3", "qwen3_next"))
def test_the_layer_survives_the_round_trip_bitwise(model_type, tmp_path):
  folder = publish(tmp_path / "in", model_type)
  family, model, arrays = imported(folder)
  assert model.mtp_num_layers == 1
  find_family(model)  # raises if no config.json expresses the model
  assert family.config_from_hf(family.config_to_hf(model))["mtp_num_layers"] == 1

  reads = []

  def read(path, index):
    reads.append(f"{path} {index}")
    return arrays[path][index]

  out = tmp_path / "out"
  out.mkdir()
  write_weights(out, family, model, abstract_params(model), read)
  assert len(reads) == len(set(reads))  # copies are not read again
  got = {}
  for file in out.glob("*.safetensors"):
    got |= load_file(file)
  want = load_file(folder / "model.safetensors")
  assert got.keys() == want.keys()
  for name, array in want.items():
    assert got[name].tobytes() == array.tobytes(), name


def test_a_model_may_be_imported_without_its_layer(tmp_path):
  folder = publish(tmp_path / "in", "deepseek_v3")
  _, model, arrays = imported(folder, mtp_num_layers=0)
  _, plain, plain_arrays = imported(FIXTURES / "deepseek_v3")
  assert model.mtp_num_layers == plain.mtp_num_layers == 0
  jax.tree.map(np.testing.assert_array_equal, arrays, plain_arrays)


def test_a_layer_with_another_embedding_is_refused(tmp_path):
  number = json.loads((FIXTURES / "glm4_moe" / "config.json").read_text())["num_hidden_layers"]
  name = f"model.layers.{number}.embed_tokens.weight"
  other = load_file(FIXTURES / "glm4_moe" / "model.safetensors")["model.embed_tokens.weight"] + 1
  with pytest.raises(UserError, match=r"embed_tokens\.weight, which differs from model\.embed_tok"):
    imported(publish(tmp_path / "in", "glm4_moe", **{name: other}))


def test_a_further_decoder_layer_is_no_layer_of_multi_token_prediction(tmp_path):
  folder = tmp_path / "folder"
  shutil.copytree(FIXTURES / "deepseek_v3", folder)
  tensors = load_file(folder / "model.safetensors")
  number = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
  name = f"model.layers.{number}.input_layernorm.weight"
  tensors[name] = tensors["model.norm.weight"].copy()
  save_file(tensors, folder / "model.safetensors")
  with pytest.raises(UserError, match=f"has 1 tensors .*: {name}"):
    imported(folder)


def their_layer(config, tensors):
  """The decoder layer of transformers after those of `config`, with these tensors."""
  import torch
  from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer

  layer = DeepseekV3DecoderLayer(config, config.num_hidden_layers - 1).eval()
  names = layer.state_dict()
  state = {name: tensor for name, tensor in tensors.items() if name in names}
  for stacked, parts in {
    "mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    "mlp.experts.down_proj": ("down_proj",),
  }.items():
    experts = []
    for e in range(config.n_routed_experts):
      experts.append(torch.cat([tensors[f"mlp.experts.{e}.{part}.weight"] for part in parts]))
    state[stacked] = torch.stack(experts)
  layer.load_state_dict(state)
  return layer


def their_logits(folder, tokens_BT):
  """The logits of the layer in a folder of DeepSeek-V3, from the modules that transformers has."""
  import torch
  from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

  config = DeepseekV3Config.from_pretrained(folder, attn_implementation="eager")
  model = DeepseekV3ForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32).eval()
  prefix = f"model.layers.{config.num_hidden_layers}."
  tensors = {}
  for name, tensor in load_file(folder / "model.safetensors").items():
    if name.startswith(prefix):
      tensors[name.removeprefix(prefix)] = torch.from_numpy(tensor)

  def norm(name, x):
    return torch.rms_norm(x, x.shape[-1:], tensors[f"{name}.weight"], config.rms_norm_eps)

  with torch.no_grad():
    tokens = torch.from_numpy(tokens_BT).long()
    hidden = model.model(tokens).last_hidden_state[:, :-1]
    embedding = model.model.embed_tokens(tokens)[:, 1:]
    pair = torch.cat([norm("enorm", embedding), norm("hnorm", hidden)], dim=-1)
    x = pair @ tensors["eh_proj.weight"].T
    num_places = x.shape[1]
    places = torch.arange(num_places)[None]
    x = their_layer(config, tensors)(
      x,
      attention_mask=torch.full((num_places, num_places), -torch.inf).triu(1)[None, None],
      position_ids=places,
      position_embeddings=model.model.rotary_emb(x, places),
    )
    if isinstance(x, tuple):
      x = x[0]
    return model.lm_head(norm("shared_head.norm", x)).numpy()


@pytest.mark.hf
@needs_transformers
def test_logits_equal_those_of_the_modules_of_transformers(tmp_path):
  """DeepSeek-V3 (2024), eq. 21 to 23, with the embedding first."""
  folder = publish(tmp_path / "in", "deepseek_v3")
  model, params = load(folder, dtype="float32")
  decoder = model.decoder
  tokens_BT = np.random.default_rng(0).integers(model.cfg.vocab_size, size=(2, 9), dtype=np.int32)
  segment_BT = np.ones_like(tokens_BT)
  position_BT = np.broadcast_to(np.arange(9, dtype=np.int32), tokens_BT.shape)

  @jax.jit
  def logits(params):
    run = functools.partial(decoder.apply, {"params": params})
    x_BTD, _ = run(tokens_BT, segment_BT, position_BT, method=decoder.hidden)
    y_BTJD, _ = run(x_BTD, tokens_BT, segment_BT, position_BT, method=decoder.mtp_hidden)
    return run(y_BTJD[:, :, 0], method=decoder.logits)

  got = np.asarray(logits(params))[:, :-1]
  want = their_logits(folder, tokens_BT)
  np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
