"""Phi-3, Phi-4 and Phi-4-mini: layers of Llama whose projections share tensors; and Phi-1 to 2."""

from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  ATTENTION,
  DECODER_KEYS,
  DENSE_KEYS,
  NORMS,
  QKV_BIAS,
  SLIDING_WINDOW,
  HfFamily,
  Key,
  TensorRule,
  layer_norm,
  plain_mlp,
)
from maxlite.storage.json_values import Json, JsonObject

RULES = (
  # Parameters of one tensor are concatenated along its rows.
  TensorRule("attention/query/kernel", "self_attn.qkv_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/key/kernel", "self_attn.qkv_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/value/kernel", "self_attn.qkv_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
  TensorRule("mlp/wi_0/kernel", "mlp.gate_up_proj.weight", "d f -> f d"),
  TensorRule("mlp/wi_1/kernel", "mlp.gate_up_proj.weight", "d f -> f d"),
  TensorRule("mlp/wo/kernel", "mlp.down_proj.weight", "f d -> d f"),
)


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  # transformers reads yarn as longrope here, and no other type.
  if keys["rope_type"] not in ("default", "longrope"):
    raise UserError(
      f"config.json has a rotary embedding of type {keys['rope_type']!r}, but maxlite supports "
      "only default and longrope here: choose another checkpoint"
    )
  return {}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  return {"original_max_position_embeddings": cfg.rope.original_max_position_embeddings}


PHI3 = HfFamily(
  "phi3",
  "Phi3ForCausalLM",
  "llama",
  (*NORMS, *RULES),
  (*DENSE_KEYS, SLIDING_WINDOW),
  defaults={
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "original_max_position_embeddings": 4096,
  },
  nullable=("num_key_value_heads", "sliding_window"),
  partial_rotary=True,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  unread=("embd_pdrop", "resid_pdrop"),
)
PHI = HfFamily(
  "phi",
  "PhiForCausalLM",
  "phi",
  (
    *layer_norm("attention_norm", "input_layernorm"),
    *ATTENTION[:-1],
    *QKV_BIAS,
    TensorRule("attention/out/kernel", "self_attn.dense.weight", "h c d -> d (h c)"),
    TensorRule("attention/out/bias", "self_attn.dense.bias", "d -> d"),
    *plain_mlp("mlp", "mlp.fc1", "mlp.fc2"),
  ),
  DENSE_KEYS,
  decoder_keys=(*DECODER_KEYS[:-1], Key("normalization_layer_epsilon", "layer_norm_eps")),
  defaults={
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "qk_layernorm": False,
  },
  nullable=("num_key_value_heads",),
  required={"qk_layernorm": False},
  activation="",
  is_gated=False,
  partial_rotary=True,
  outer=(
    TensorRule("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
    *layer_norm("final_norm", "model.final_layernorm"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
    TensorRule("unembed_bias/bias", "lm_head.bias", "v -> v"),
  ),
  unread=("embd_pdrop", "resid_pdrop"),
  unwritten=("attention_bias",),
)
FAMILIES = (PHI3, PHI)
