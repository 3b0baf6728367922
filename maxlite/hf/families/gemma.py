"""Gemma 1 and 2, and the text model of Gemma 3."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  ATTENTION,
  BLOCK,
  DENSE_KEYS,
  QK_NORM,
  SLIDING_WINDOW,
  HfFamily,
  Key,
  TensorRule,
  mlp,
)
from maxlite.hf.hf_rope import layered_rope_from_hf, layered_rope_to_hf
from maxlite.storage.json_values import Json, JsonObject

POST_NORMS = (
  TensorRule("attention_norm/scale", "input_layernorm.weight", "d -> d"),
  TensorRule("attention_post_norm/scale", "post_attention_layernorm.weight", "d -> d"),
  TensorRule("mlp_norm/scale", "pre_feedforward_layernorm.weight", "d -> d"),
  TensorRule("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "d -> d"),
)


def _extra_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  _require_causal(hf, keys)
  scalar = hf["query_pre_attn_scalar"]
  if scalar <= 0:
    raise UserError(f"config.json has query_pre_attn_scalar={scalar}: write a positive number")
  if scalar == keys["head_dim"]:
    return {"query_pre_attn_scalar": 0.0}
  return {"query_pre_attn_scalar": float(scalar)}


def _require_causal(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  if hf.get("use_bidirectional_attention"):
    hf.require(use_bidirectional_attention=False)
  return {}


def _gemma3_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  hf.require(sliding_window_pattern=MODELS["gemma3"].global_layer_every)
  return _extra_from_hf(hf, keys)


def _gemma3_rope(hf: ConfigJson) -> JsonObject:
  return layered_rope_from_hf(hf, hf.get("rope_local_base_freq"))


def _scalar_to_hf(cfg: ModelConfig) -> JsonObject:
  return {"query_pre_attn_scalar": int(cfg.query_pre_attn_scalar) or cfg.head_dim}


FINAL_SOFT_CAP = Key("final_logits_soft_cap", "final_logit_softcapping", null=0.0, off=0.0)
_DEFAULTS = {
  "hidden_size": 2304,
  "intermediate_size": 9216,
  "num_hidden_layers": 26,
  "num_attention_heads": 8,
  "num_key_value_heads": 4,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "rms_norm_eps": 1e-6,
  "tie_word_embeddings": True,
  "attention_bias": False,
  "query_pre_attn_scalar": 256,
  "sliding_window": 4096,
  "layer_types": None,
}
GEMMA = HfFamily(
  "gemma",
  "GemmaForCausalLM",
  "gemma",
  BLOCK,
  DENSE_KEYS,
  defaults={
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_bidirectional_attention": None,
  },
  activation="gelu_pytorch_tanh",
  activation_aliases=("gelu",),  # published by mistake, and corrected by transformers
  extra_from_hf=_require_causal,
  unread=("hidden_activation",),
)
GEMMA2 = HfFamily(
  "gemma2",
  "Gemma2ForCausalLM",
  "gemma2",
  (*POST_NORMS, *ATTENTION, *QK_NORM, *mlp("mlp", "mlp")),
  (
    *DENSE_KEYS,
    SLIDING_WINDOW,
    FINAL_SOFT_CAP,
    Key("attn_logits_soft_cap", "attn_logit_softcapping", null=0.0, off=0.0),
  ),
  defaults=_DEFAULTS
  | {
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "use_bidirectional_attention": None,
  },
  nullable=("final_logit_softcapping", "attn_logit_softcapping"),
  activation="gelu_pytorch_tanh",
  activation_key="hidden_activation",
  checks_layer_types=True,
  extra_from_hf=_extra_from_hf,
  extra_to_hf=_scalar_to_hf,
  unread=("hidden_act",),
)
GEMMA3 = dataclasses.replace(
  GEMMA2,
  model_type="gemma3_text",
  architecture="Gemma3ForCausalLM",
  decoder_block="gemma3",
  keys=(*DENSE_KEYS, SLIDING_WINDOW, FINAL_SOFT_CAP),
  defaults=_DEFAULTS
  | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
  },
  nullable=("final_logit_softcapping",),
  extra_from_hf=_gemma3_from_hf,
  rope_from_hf=_gemma3_rope,
  rope_to_hf=layered_rope_to_hf,
  # transformers reads the soft cap of attention, but does not apply it.
  unread=("hidden_act", "attn_logit_softcapping", "_sliding_window_pattern"),
)
FAMILIES = (GEMMA, GEMMA2, GEMMA3)
