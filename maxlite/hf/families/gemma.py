"""Gemma 2, and the text model of Gemma 3."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf.family import (
  ATTENTION,
  DENSE_KEYS,
  QK_NORM,
  SLIDING_WINDOW,
  HfFamily,
  Key,
  TensorRule,
  mlp,
  require,
  rope_from_hf,
  rope_to_hf,
)

GLOBAL, LOCAL = "full_attention", "sliding_attention"
NORMS = (
  TensorRule("attention_norm/scale", "input_layernorm.weight", "d -> d"),
  TensorRule("attention_post_norm/scale", "post_attention_layernorm.weight", "d -> d"),
  TensorRule("mlp_norm/scale", "pre_feedforward_layernorm.weight", "d -> d"),
  TensorRule("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "d -> d"),
)


def _extra_from_hf(hf: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
  if hf.get("use_bidirectional_attention"):
    require(hf, use_bidirectional_attention=False)
  scalar = hf["query_pre_attn_scalar"]
  return {"query_pre_attn_scalar": 0.0 if scalar == keys["head_dim"] else float(scalar)}


def _rope_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Newer files have `rope_parameters` by layer type, older ones a base for each type."""
  ropes = hf.get("rope_parameters") or {}
  if GLOBAL in ropes:
    require(ropes[LOCAL], rope_type="default")
    local, rope = ropes[LOCAL]["rope_theta"], {"rope_parameters": ropes[GLOBAL]}
  else:
    local = hf.get("rope_local_base_freq", 10_000.0)
    rope = {"rope_theta": hf.get("rope_theta", 1e6), "rope_scaling": hf.get("rope_scaling")}
  keys = rope_from_hf(rope)
  is_same = keys["rope_type"] == "default" and keys["rope_max_timescale"] == local
  return keys | {"local_rope_max_timescale": 0.0 if is_same else float(local)}


def _rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  keys = rope_to_hf(cfg)
  local = cfg.rope.local_rope_max_timescale or cfg.rope.rope_max_timescale
  ropes = {LOCAL: {"rope_type": "default", "rope_theta": local}, GLOBAL: keys["rope_parameters"]}
  return keys | {"rope_parameters": ropes}


GEMMA2 = HfFamily(
  "gemma2",
  "Gemma2ForCausalLM",
  "gemma2",
  (*NORMS, *ATTENTION, *QK_NORM, *mlp("mlp", "mlp")),
  (
    *DENSE_KEYS,
    SLIDING_WINDOW,
    Key("attn_logits_soft_cap", "attn_logit_softcapping", 0.0, writes_null=True),
    Key("final_logits_soft_cap", "final_logit_softcapping", 0.0, writes_null=True),
  ),
  activation="gelu_pytorch_tanh",
  activation_key="hidden_activation",
  tied=True,
  checks_layer_types=True,
  extra_from_hf=_extra_from_hf,
  extra_to_hf=lambda cfg: {"query_pre_attn_scalar": int(cfg.query_pre_attn_scalar) or cfg.head_dim},
)
GEMMA3 = dataclasses.replace(
  GEMMA2,
  model_type="gemma3_text",
  architecture="Gemma3ForCausalLM",
  decoder_block="gemma3",
  rope_from_hf=_rope_from_hf,
  rope_to_hf=_rope_to_hf,
)
FAMILIES = (GEMMA2, GEMMA3)
