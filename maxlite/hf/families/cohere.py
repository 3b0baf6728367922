"""Cohere and Cohere2 (Command R, R7B, A): attention and gated MLP of one norm, without a bias."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  DECODER_KEYS,
  DENSE_KEYS,
  OUTER,
  SLIDING_WINDOW,
  HfFamily,
  Key,
  TensorRule,
  mlp,
)
from maxlite.storage.json_values import Json, JsonObject

BLOCK = (
  TensorRule("attention_norm/scale", "input_layernorm.weight", "d -> d"),
  # Rotary pairs are adjacent channels.
  TensorRule("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c*) d"),
  TensorRule("attention/key/kernel", "self_attn.k_proj.weight", "d h c -> (h c*) d"),
  TensorRule("attention/value/kernel", "self_attn.v_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
  TensorRule("attention/query_norm/scale", "self_attn.q_norm.weight", "h c -> h c*"),
  TensorRule("attention/key_norm/scale", "self_attn.k_norm.weight", "h c -> h c*"),
  *mlp("mlp", "mlp"),
)


def _logits_scaling(hf: ConfigJson) -> float:
  """Return the number by which maxlite divides logits: the inverse of their factor."""
  scale: float = hf["logit_scale"]
  if scale <= 0:
    raise UserError(
      f"config.json has logit_scale={scale}, but maxlite supports only positive numbers: choose "
      "another checkpoint"
    )
  return 1 / scale


def _cohere_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  decoder_block = "cohere_qk_norm" if hf["use_qk_norm"] else "cohere"
  return {"decoder_block": decoder_block, "logits_scaling": _logits_scaling(hf)}


def _cohere_to_hf(cfg: ModelConfig) -> JsonObject:
  return _to_hf(cfg) | {"use_qk_norm": bool(cfg.family.attention.qk_norm)}


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  hf.require(sliding_window_pattern=MODELS["cohere2"].global_layer_every)
  return {"logits_scaling": _logits_scaling(hf)}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  return {"logit_scale": 1 / cfg.logits_scaling}


COHERE2 = HfFamily(
  "cohere2",
  "Cohere2ForCausalLM",
  "cohere2",
  BLOCK,
  (*DENSE_KEYS, SLIDING_WINDOW),
  decoder_keys=(*DECODER_KEYS[:-1], Key("normalization_layer_epsilon", "layer_norm_eps")),
  defaults={
    "vocab_size": 256000,
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "sliding_window": 4096,
    "layer_types": None,
  },
  nullable=("num_key_value_heads",),
  # Of published files, not read by transformers.
  required={
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
    "use_embedding_sharing": True,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "use_qk_norm": False,
  },
  checks_layer_types=True,
  outer=OUTER,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  unread=("layer_switch",),
)
_COHERE2_ONLY = ("sliding_window", "layer_types")
COHERE = dataclasses.replace(
  COHERE2,
  model_type="cohere",
  architecture="CohereForCausalLM",
  decoder_block="cohere",
  keys=DENSE_KEYS,
  variants=("cohere_qk_norm",),
  defaults={name: value for name, value in COHERE2.defaults.items() if name not in _COHERE2_ONLY}
  | {"rope_theta": 500_000.0, "use_qk_norm": False},
  nullable=("num_key_value_heads", "use_qk_norm"),
  required={},
  checks_layer_types=False,
  extra_from_hf=_cohere_from_hf,
  extra_to_hf=_cohere_to_hf,
  unread=(),
)
FAMILIES = (COHERE, COHERE2)
