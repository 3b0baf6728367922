"""GLM-4 and 4.1, and mixtures of experts: GLM-4.5 to 4.7, and GLM-4.7-Flash.

GLM-4.5-Air has no QK-norm.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.deepseek import V3, v3_from_hf, v3_to_hf
from maxlite.hf.families.mixtral import dense_layer_keys, has_experts_of
from maxlite.hf.family import (
  ATTENTION,
  BLOCK,
  DENSE_KEYS,
  MTP_LAYER,
  NORMS,
  QKV_BIAS,
  HfFamily,
  Key,
  TensorRule,
  experts,
  mlp,
)
from maxlite.storage.json_values import Json, JsonObject

FUSED_MLP = (
  # Parameters of one tensor are concatenated along its rows.
  TensorRule("mlp/wi_0/kernel", "mlp.gate_up_proj.weight", "d f -> f d"),
  TensorRule("mlp/wi_1/kernel", "mlp.gate_up_proj.weight", "d f -> f d"),
  TensorRule("mlp/wo/kernel", "mlp.down_proj.weight", "f d -> d f"),
)
_ROTATED = (
  "attention/query/kernel",
  "attention/query/bias",
  "attention/key/kernel",
  "attention/key/bias",
)


def _attention(cfg: ModelConfig) -> Sequence[TensorRule]:
  """Return rules of attention; rotated channels are pairs (2c, 2c + 1), and halves of them here."""
  num_rotated = int(cfg.head_dim * cfg.rope.partial_rotary_factor)
  rules = []
  for rule in (*ATTENTION, *QKV_BIAS):
    axes = rule.axes
    if rule.ours in _ROTATED:
      axes = axes.replace("(h c)", f"(h c*{num_rotated})")
    rules.append(dataclasses.replace(rule, axes=axes))
  return rules


def _partial_rotary_to_hf(cfg: ModelConfig) -> JsonObject:
  return {"partial_rotary_factor": cfg.rope.partial_rotary_factor}


GLM = HfFamily(
  "glm",
  "GlmForCausalLM",
  "qwen2",
  (*NORMS, *FUSED_MLP),
  DENSE_KEYS,
  defaults={
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 0.00000015625,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": True,
  },
  attention_bias=True,
  partial_rotary=True,
  extra_block=_attention,
  extra_to_hf=_partial_rotary_to_hf,
)
GLM4 = dataclasses.replace(
  GLM,
  model_type="glm4",
  architecture="Glm4ForCausalLM",
  decoder_block="glm4",
  block=(
    *NORMS,
    TensorRule("attention_post_norm/scale", "post_self_attn_layernorm.weight", "d -> d"),
    TensorRule("mlp_post_norm/scale", "post_mlp_layernorm.weight", "d -> d"),
    *FUSED_MLP,
  ),
)


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  if hf["use_qk_norm"]:
    return {"decoder_block": "glm4_moe"}
  return {"decoder_block": "glm4_moe_air"}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  return {
    "use_qk_norm": cfg.family.attention.qk_norm == "head",
    "partial_rotary_factor": cfg.rope.partial_rotary_factor,
  }


GLM4_MOE = HfFamily(
  "glm4_moe",
  "Glm4MoeForCausalLM",
  "glm4_moe",
  (
    *BLOCK,
    *experts("mlp"),
    TensorRule("moe/router/bias", "mlp.gate.e_score_correction_bias", "e -> e"),
    *mlp("moe/shared_experts", "mlp.shared_experts"),
  ),
  (
    *DENSE_KEYS,
    Key("base_moe_mlp_dim", "moe_intermediate_size"),
    Key("first_num_dense_layers", "first_k_dense_replace"),
    Key("num_experts", "n_routed_experts", alias="num_local_experts"),
    Key("num_experts_per_tok", "num_experts_per_tok"),
    Key("shared_experts", "n_shared_experts"),
    Key("n_routing_groups", "n_group"),
    Key("topk_routing_group", "topk_group"),
    Key("routed_scaling_factor", "routed_scaling_factor"),
    Key("norm_topk_prob", "norm_topk_prob"),
  ),
  ours={"router": "sigmoid_group_topk", "routed_bias": True},
  defaults={
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
  },
  attention_bias=True,
  variants=("glm4_moe_air",),
  partial_rotary=True,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  mtp=MTP_LAYER,
  unread=("num_mtp_layers",),
)

_DENSE = "dense"
_SPARSE = "sparse"


def _lite_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Read which layers are dense: `mlp_layer_types`, or null for the first."""
  v3_from_hf(hf, keys)
  num_layers = keys["base_num_decoder_layers"]
  types = hf.get("mlp_layer_types")
  if types is None:
    types = [_DENSE] + [_SPARSE] * (num_layers - 1)
  if len(types) != num_layers or not set(types) <= {_DENSE, _SPARSE}:
    raise UserError(
      f"config.json has mlp_layer_types={types}, but maxlite supports only {_DENSE} and {_SPARSE}, "
      f"for each of num_hidden_layers={num_layers}: choose another checkpoint"
    )
  # A published key that transformers does not read.
  hf.require(first_k_dense_replace=[*types, _SPARSE].index(_SPARSE))
  return dense_layer_keys([kind == _SPARSE for kind in types])


def _lite_to_hf(cfg: ModelConfig) -> JsonObject:
  types = [_SPARSE if has else _DENSE for has in has_experts_of(cfg)]
  num_dense = types.index(_SPARSE)
  return v3_to_hf(cfg) | {"mlp_layer_types": types, "first_k_dense_replace": num_dense}


GLM4_MOE_LITE = dataclasses.replace(
  V3,
  model_type="glm4_moe_lite",
  architecture="Glm4MoeLiteForCausalLM",
  keys=[key for key in V3.keys if key.ours != "first_num_dense_layers"],
  defaults={
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "hidden_act": "silu",
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_layer_types": None,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
  },
  nullable=("q_lora_rank",),
  extra_from_hf=_lite_from_hf,
  extra_to_hf=_lite_to_hf,
)
FAMILIES = (GLM, GLM4, GLM4_MOE, GLM4_MOE_LITE)
