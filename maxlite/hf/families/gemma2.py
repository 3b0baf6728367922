"""Gemma 2."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.family import Family, Row

ACTIVATION = "gelu_pytorch_tanh"
NORMS = (
  Row("attention_norm/scale", "input_layernorm.weight", "d -> d"),
  Row("attention_post_norm/scale", "post_attention_layernorm.weight", "d -> d"),
  Row("mlp_norm/scale", "pre_feedforward_layernorm.weight", "d -> d"),
  Row("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "d -> d"),
)


def shared_from_hf(
  hf: Mapping[str, Any], global_every: int, rope: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Keys of Gemma 2 and 3; `rope` as of shared_mappings.decoder_from_hf."""
  if hf.get("use_bidirectional_attention"):
    shared_mappings.require(hf, use_bidirectional_attention=False)
  shared_mappings.require_layer_types(hf, global_every)
  keys = shared_mappings.decoder_from_hf(hf, activation=ACTIVATION, tied=True, rope=rope)
  scalar = hf["query_pre_attn_scalar"]
  return keys | {
    "base_mlp_dim": hf["intermediate_size"],
    "sliding_window_size": hf.get("sliding_window") or 0,
    "attn_logits_soft_cap": float(hf.get("attn_logit_softcapping") or 0),
    "final_logits_soft_cap": float(hf.get("final_logit_softcapping") or 0),
    "query_pre_attn_scalar": 0.0 if scalar == keys["head_dim"] else float(scalar),
  }


def shared_to_hf(cfg: ModelConfig, global_every: int) -> dict[str, Any]:
  """The inverse of shared_from_hf."""
  keys = shared_mappings.decoder_to_hf(cfg) | {
    "intermediate_size": cfg.base_mlp_dim,
    "hidden_activation": ACTIVATION,
    "sliding_window": cfg.sliding_window_size or None,
    "layer_types": shared_mappings.layer_types(cfg.base_num_decoder_layers, global_every),
    "attn_logit_softcapping": cfg.attn_logits_soft_cap or None,
    "final_logit_softcapping": cfg.final_logits_soft_cap or None,
    "query_pre_attn_scalar": int(cfg.query_pre_attn_scalar) or cfg.head_dim,
  }
  return {name: value for name, value in keys.items() if name != "hidden_act"}


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  return shared_from_hf(hf, 2)


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return shared_to_hf(cfg, 2)


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  return (*NORMS, *shared_mappings.ATTENTION, *shared_mappings.mlp("mlp", "mlp"))


FAMILY = Family("gemma2", "Gemma2ForCausalLM", "gemma2", config_from_hf, config_to_hf, block)
