"""DeepSeek-V3.2, and GLM-5 and 5.1: latent attention to the keys that an indexer selects."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.deepseek import V3, v3_from_hf, v3_to_hf
from maxlite.hf.family import Key, TensorRule
from maxlite.storage.json_values import Json, JsonObject

INDEXER = (
  TensorRule("attention/indexer/query/kernel", "self_attn.indexer.wq_b.weight", "q h c -> (h c) q"),
  TensorRule("attention/indexer/key/kernel", "self_attn.indexer.wk.weight", "d c -> c d"),
  TensorRule("attention/indexer/key_norm/scale", "self_attn.indexer.k_norm.weight", "c -> c"),
  TensorRule("attention/indexer/key_norm/bias", "self_attn.indexer.k_norm.bias", "c -> c"),
  TensorRule(
    "attention/indexer/head_weights/kernel",
    "self_attn.indexer.weights_proj.weight",
    "d h -> h d",
  ),
)


def _mlp_layer_types(num_dense: int, num_layers: int) -> list[Json]:
  return ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense)


def _v32_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Read which layers are dense: `mlp_layer_types`, or null for the first_k_dense_replace first."""
  v3_from_hf(hf, keys)
  num_layers = keys["base_num_decoder_layers"]
  if hf.get("layer_types") is not None:
    hf.require(layer_types=["indexed_attention"] * num_layers)
  num_dense = min(hf["first_k_dense_replace"], num_layers)
  types = hf.get("mlp_layer_types")
  if types is None:
    return {"first_num_dense_layers": num_dense}
  num_listed = types.count("dense")
  hf.require(mlp_layer_types=_mlp_layer_types(num_listed, num_layers))
  if "first_k_dense_replace" in hf and num_listed != num_dense:
    hf.require(first_k_dense_replace=num_listed)
  return {"first_num_dense_layers": num_listed}


def _v32_to_hf(cfg: ModelConfig) -> JsonObject:
  num_dense = cfg.moe.first_num_dense_layers
  num_layers = cfg.base_num_decoder_layers
  return v3_to_hf(cfg) | {
    "first_k_dense_replace": num_dense,
    "mlp_layer_types": _mlp_layer_types(num_dense, num_layers),
  }


def _glm_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Refuse layers that attend the keys of an earlier layer's indexer, as in GLM-5.2."""
  num_layers = keys["base_num_decoder_layers"]
  types = hf.get("indexer_types")
  if types is None:
    hf.require(index_topk_pattern=None)
    hf.require(index_topk_freq=1)
  elif types != ["full"] * num_layers:
    raise UserError(
      f"config.json has indexer_types={types!r}, but maxlite supports only {num_layers} times "
      "'full' here, not layers that share the keys of an earlier one: choose another checkpoint"
    )
  return _v32_from_hf(hf, keys)


def _glm_to_hf(cfg: ModelConfig) -> JsonObject:
  return _v32_to_hf(cfg) | {"indexer_types": ["full"] * cfg.base_num_decoder_layers}


V32 = dataclasses.replace(
  V3,
  model_type="deepseek_v32",
  architecture="DeepseekV32ForCausalLM",
  block=(*V3.block, *INDEXER),
  keys=(
    *(key for key in V3.keys if key.ours != "first_num_dense_layers"),
    Key("indexer_n_heads", "index_n_heads"),
    Key("indexer_head_dim", "index_head_dim"),
    Key("indexer_topk", "index_topk"),
  ),
  ours={**V3.ours, "use_indexer": True, "indexer_rope_interleave": False},
  defaults={
    **{name: value for name, value in V3.defaults.items() if name != "rope_interleave"},
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "layer_types": None,
    "max_position_embeddings": 163840,
    "mlp_bias": False,
    "mlp_layer_types": None,
  },
  nullable=(),
  required={**V3.required, "indexer_rope_interleave": False},
  extra_from_hf=_v32_from_hf,
  extra_to_hf=_v32_to_hf,
  unread=(*V3.unread, "head_dim"),
)
GLM_MOE_DSA = dataclasses.replace(
  V32,
  model_type="glm_moe_dsa",
  architecture="GlmMoeDsaForCausalLM",
  ours={**V32.ours, "indexer_rope_interleave": True},
  defaults={
    **V32.defaults,
    "vocab_size": 154880,
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "index_n_heads": 32,
    "indexer_types": None,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-5,
    "topk_group": 1,
    "v_head_dim": 256,
  },
  required={**V32.required, "indexer_rope_interleave": True},
  extra_from_hf=_glm_from_hf,
  extra_to_hf=_glm_to_hf,
  # What indexer_types says in another way, and which keys layers of multi-token prediction select.
  unread=(
    *V32.unread,
    *("index_topk_freq", "index_topk_pattern", "index_skip_topk_offset"),
    "index_share_for_mtp_iteration",
  ),
)
FAMILIES = (V32, GLM_MOE_DSA)
