"""Gemma 2."""

from collections.abc import Mapping
from typing import Any

from maxlite.hf.config_keys import Key, require
from maxlite.hf.family import HfFamily, TensorRule
from maxlite.hf.shared_mappings import ATTENTION, DENSE_KEYS, QK_NORM, SLIDING_WINDOW, mlp

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


FAMILY = HfFamily(
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
