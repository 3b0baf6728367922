"""LFM2: short convolutions, and attention in the layers that are listed; dense or with experts."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  DECODER_KEYS,
  DENSE_KEYS,
  NORM_TOPK_PROB,
  HfFamily,
  Key,
  TensorRule,
  fused_experts,
)
from maxlite.storage.json_values import Json, JsonObject

_IN = "conv.in_proj.weight"
LAYER = (
  TensorRule("attention_norm/scale", "operator_norm.weight", "d -> d"),
  TensorRule("mlp_norm/scale", "ffn_norm.weight", "d -> d"),
  TensorRule("moe_norm/scale", "ffn_norm.weight", "d -> d"),
  TensorRule("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/key/kernel", "self_attn.k_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/value/kernel", "self_attn.v_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/out/kernel", "self_attn.out_proj.weight", "h c d -> d (h c)"),
  TensorRule("attention/query_norm/scale", "self_attn.q_layernorm.weight", "c -> c"),
  TensorRule("attention/key_norm/scale", "self_attn.k_layernorm.weight", "c -> c"),
  TensorRule("short_conv/key/kernel", _IN, "d f -> f d"),
  TensorRule("short_conv/gate/kernel", _IN, "d f -> f d"),
  TensorRule("short_conv/value/kernel", _IN, "d f -> f d"),
  TensorRule("short_conv/value_conv", "conv.conv.weight", "w f -> f () w"),
  TensorRule("short_conv/wo/kernel", "conv.out_proj.weight", "f d -> d f"),
  TensorRule("mlp/wi_0/kernel", "feed_forward.w1.weight", "d f -> f d"),
  TensorRule("mlp/wi_1/kernel", "feed_forward.w3.weight", "d f -> f d"),
  TensorRule("mlp/wo/kernel", "feed_forward.w2.weight", "f d -> d f"),
)
EXPERTS = (
  TensorRule("moe/router/kernel", "feed_forward.gate.weight", "d e -> e d"),
  TensorRule("moe/router/bias", "feed_forward.expert_bias", "e -> e"),
  TensorRule("moe/wi_0", "feed_forward.experts.{expert}.w1.weight", "e d f -> f d"),
  TensorRule("moe/wi_1", "feed_forward.experts.{expert}.w3.weight", "e d f -> f d"),
  TensorRule("moe/wo", "feed_forward.experts.{expert}.w2.weight", "e f d -> d f"),
)
KEYS = (Key("short_conv_kernel_dim", "conv_L_cache"),)
_DECODER_KEYS = (*DECODER_KEYS[:-1], Key("normalization_layer_epsilon", "norm_eps"))
_CONV = "conv"
_ATTENDING = ("full_attention", "attention")


def _attention_layers(hf: ConfigJson) -> tuple[int, ...]:
  """Return the layers that attend.

  Raises:
    UserError: a layer is of another kind, or there is not one kind for each layer.
  """
  num_layers = hf["num_hidden_layers"]
  listed = hf.get("full_attn_idxs")
  kinds = hf.get("layer_types")
  if kinds is None:
    return tuple(layer for layer in range(num_layers) if listed is None or layer in listed)
  if len(kinds) != num_layers or not {*kinds} <= {_CONV, *_ATTENDING}:
    raise UserError(
      f"config.json has layer_types={list(kinds)}, but maxlite supports only {_CONV} and "
      f"{_ATTENDING[0]} here, for each of {num_layers} layers: choose another checkpoint"
    )
  return tuple(layer for layer, kind in enumerate(kinds) if kind != _CONV)


def _layer_types(cfg: ModelConfig) -> list[str]:
  kinds = []
  for layer in range(cfg.base_num_decoder_layers):
    kinds.append(_ATTENDING[0] if layer in cfg.attention_layers else _CONV)
  return kinds


def _tied(hf: ConfigJson) -> bool:
  """Return whether the embedding is tied; files of LFM2 have another name for the key."""
  if "tie_embedding" in hf:
    return bool(hf["tie_embedding"])
  return bool(hf["tie_word_embeddings"])


def _mlp_dim(hf: ConfigJson) -> int:
  """Return the width of the MLP, which is derived from the number in config.json."""
  width = hf["block_ff_dim"] if "block_ff_dim" in hf else hf["intermediate_size"]
  multiple = hf["block_multiple_of"]
  multiplier = hf.get("block_ffn_dim_multiplier")
  if not hf.get("block_auto_adjust_ff_dim"):
    return width
  width = int(2 * width / 3)
  if multiplier is None:
    return width
  return -(-int(multiplier * width) // multiple) * multiple


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  return {
    "attention_layers": _attention_layers(hf),
    "base_mlp_dim": _mlp_dim(hf),
    "logits_via_embedding": _tied(hf),
  }


def _to_hf(cfg: ModelConfig) -> JsonObject:
  return {"layer_types": _layer_types(cfg), "block_auto_adjust_ff_dim": False}


def _moe_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  _ = hf["layer_types"]  # which has no default
  return {"attention_layers": _attention_layers(hf), "logits_via_embedding": _tied(hf)}


def _moe_to_hf(cfg: ModelConfig) -> JsonObject:
  return {"layer_types": _layer_types(cfg)}


_DEFAULTS = {
  "vocab_size": 65536,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "max_position_embeddings": 128_000,
  "norm_eps": 1e-5,
  "rope_theta": 1_000_000.0,
  "tie_word_embeddings": True,
  "conv_bias": False,
  "conv_L_cache": 3,
  "layer_types": None,
}
LFM2 = HfFamily(
  "lfm2",
  "Lfm2ForCausalLM",
  "lfm2",
  LAYER,
  (*DENSE_KEYS, *KEYS),
  decoder_keys=_DECODER_KEYS,
  defaults=_DEFAULTS
  | {
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
  },
  required={"conv_bias": False},
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  outer=(
    TensorRule("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
    TensorRule("final_norm/scale", "model.embedding_norm.weight", "d -> d"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
  ),
  unread=("rms_norm_eps",),
)
LFM2_MOE = dataclasses.replace(
  LFM2,
  model_type="lfm2_moe",
  architecture="Lfm2MoeForCausalLM",
  decoder_block="lfm2_moe",
  block=(*LAYER, *EXPERTS),
  keys=(
    *DENSE_KEYS,
    *KEYS,
    Key("base_moe_mlp_dim", "moe_intermediate_size"),
    Key("num_experts", "num_experts"),
    Key("num_experts_per_tok", "num_experts_per_tok"),
    Key("first_num_dense_layers", "num_dense_layers"),
    Key("routed_bias", "use_expert_bias"),
    Key("routed_scaling_factor", "routed_scaling_factor"),
    NORM_TOPK_PROB,
  ),
  ours={"router": "sigmoid_group_topk"},
  defaults=_DEFAULTS
  | {
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
  },
  extra_from_hf=_moe_from_hf,
  extra_to_hf=_moe_to_hf,
  peft_experts=fused_experts("feed_forward.experts"),
)
FAMILIES = (LFM2, LFM2_MOE)
