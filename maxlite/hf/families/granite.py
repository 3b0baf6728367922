"""Granite 3: layers of Llama or Mixtral, with multipliers at four places.

Those of Mixtral may have a shared expert too.
"""

import dataclasses
from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.llama import LLAMA
from maxlite.hf.families.qwen2_moe import num_shared_experts
from maxlite.hf.family import (
  ATTENTION,
  DENSE_KEYS,
  MOE_KEYS,
  NORMS,
  HfFamily,
  Key,
  TensorRule,
  fused_experts,
)
from maxlite.storage.json_values import Json, JsonObject

RULES = (
  TensorRule("moe/router/kernel", "block_sparse_moe.router.layer.weight", "d e -> e d"),
  TensorRule(
    ("moe/wi_0", "moe/wi_1"), "block_sparse_moe.input_linear.weight", "g e d f -> e (g f) d"
  ),
  TensorRule("moe/wo", "block_sparse_moe.output_linear.weight", "e f d -> e d f"),
)
SHARED = (
  # Parameters of one tensor are concatenated along its rows.
  TensorRule("moe/shared_experts/wi_0/kernel", "shared_mlp.input_linear.weight", "d f -> f d"),
  TensorRule("moe/shared_experts/wi_1/kernel", "shared_mlp.input_linear.weight", "d f -> f d"),
  TensorRule("moe/shared_experts/wo/kernel", "shared_mlp.output_linear.weight", "f d -> d f"),
)
MULTIPLIERS = (
  Key("embedding_multiplier", "embedding_multiplier"),
  Key("residual_multiplier", "residual_multiplier"),
  Key("logits_scaling", "logits_scaling"),
)


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Read the factor of attention scores, which is query_pre_attn_scalar ** -0.5 here."""
  multiplier = hf["attention_multiplier"]
  if multiplier <= 0:
    raise UserError(
      f"config.json has attention_multiplier={multiplier}, but maxlite supports only positive "
      "numbers: choose another checkpoint"
    )
  scalar = multiplier**-2
  if scalar == keys["head_dim"]:
    scalar = 0.0
  return {"query_pre_attn_scalar": scalar}


def _shared_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  num_shared = 0
  if hf["shared_intermediate_size"]:
    num_shared = num_shared_experts(hf, "shared_intermediate_size", "intermediate_size")
  return _from_hf(hf, keys) | {"shared_experts": num_shared}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  scalar = cfg.query_pre_attn_scalar or cfg.head_dim
  return {"attention_multiplier": float(scalar) ** -0.5}


def _shared_to_hf(cfg: ModelConfig) -> JsonObject:
  width = cfg.moe.shared_experts * cfg.moe.base_moe_mlp_dim
  return _to_hf(cfg) | {"shared_intermediate_size": width}


_DEFAULTS = {
  "vocab_size": 32000,
  "hidden_size": 4096,
  "intermediate_size": 11008,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": None,
  "hidden_act": "silu",
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": False,
  "attention_bias": False,
  "embedding_multiplier": 1.0,
  "logits_scaling": 1.0,
  "residual_multiplier": 1.0,
  "attention_multiplier": 1.0,
}
GRANITE = dataclasses.replace(
  LLAMA,
  model_type="granite",
  architecture="GraniteForCausalLM",
  keys=(*DENSE_KEYS, *MULTIPLIERS),
  defaults=_DEFAULTS | {"mlp_bias": False},
  nullable=("num_key_value_heads",),
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
)
GRANITEMOE = HfFamily(
  "granitemoe",
  "GraniteMoeForCausalLM",
  "mixtral",
  (*NORMS, *ATTENTION, *RULES),
  (
    *MOE_KEYS,
    Key("num_experts", "num_local_experts"),
    *MULTIPLIERS,
  ),
  ours={"router": "softmax_topk", "norm_topk_prob": True},
  defaults=_DEFAULTS
  | {
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
  },
  nullable=("num_key_value_heads",),
  aux_loss_key="router_aux_loss_coef",
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  peft_experts=fused_experts("block_sparse_moe.experts"),
)
GRANITEMOESHARED = dataclasses.replace(
  GRANITEMOE,
  model_type="granitemoeshared",
  architecture="GraniteMoeSharedForCausalLM",
  block=(*GRANITEMOE.block, *SHARED),
  defaults={**GRANITEMOE.defaults, "shared_intermediate_size": 0},
  extra_from_hf=_shared_from_hf,
  extra_to_hf=_shared_to_hf,
)
FAMILIES = (GRANITE, GRANITEMOE, GRANITEMOESHARED)
