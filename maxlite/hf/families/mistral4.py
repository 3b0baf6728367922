"""Ministral 3 and Mistral Small 4: queries are scaled by position, with yarn.

Ministral 3 has the layers of Mistral, Mistral Small 4 latent attention of DeepSeek and experts.
"""

import dataclasses
from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.deepseek import KEYS, LATENT_ATTENTION, V3
from maxlite.hf.families.llama import MISTRAL
from maxlite.hf.family import NORMS, Key, TensorRule, fused_experts, mlp
from maxlite.hf.hf_rope import dict_of, read_rope, rope_to_hf, rope_values
from maxlite.storage.json_values import Json, JsonObject

BETA = "llama_4_scaling_beta"
SHARE = "partial_rotary_factor"
EXPERTS = (
  TensorRule("moe/router/kernel", "mlp.gate.weight", "d e -> e d"),
  *fused_experts("mlp.experts"),
)


def _scaled_yarn(name: str, rope: JsonObject, hf: ConfigJson) -> JsonObject:
  """Return our keys of yarn, and of the factor of queries."""
  beta = rope.pop(BETA, None)
  if beta is None:
    raise KeyError(f"{name}.{BETA}")
  rope.pop("max_position_embeddings", None)  # without effect
  keys = read_rope(rope, hf, name)
  if keys["rope_type"] != "yarn":
    raise UserError(
      f"config.json has a rotary embedding of type {keys['rope_type']!r}, but maxlite supports "
      "only yarn here: choose another checkpoint"
    )
  return keys | {"query_scaling_beta": float(beta)}


def _scaled_yarn_to_hf(cfg: ModelConfig) -> JsonObject:
  keys = rope_to_hf(cfg)
  rope = dict_of(ConfigJson(keys, {}), "rope_parameters")
  rope[BETA] = cfg.rope.query_scaling_beta
  keys.pop("rope_scaling", None)
  return keys | {"rope_parameters": rope}


def _ministral3_rope(hf: ConfigJson) -> JsonObject:
  name, rope = rope_values(hf)
  return _scaled_yarn(name, rope, hf)


def _rope_from_hf(hf: ConfigJson) -> JsonObject:
  name, rope = rope_values(hf)
  # The rotated channels are a share of all channels of a head there, and an own number here.
  share = hf["qk_rope_head_dim"] / _head_dim(hf["qk_nope_head_dim"], hf["qk_rope_head_dim"])
  given = rope.pop(SHARE, share if name == "rope_parameters" else 1.0)
  if given != share:
    raise UserError(
      f"config.json has {name}.{SHARE}={given}, but its channels imply {share}: write that number"
    )
  return _scaled_yarn(name, rope, hf)


def _rope_to_hf(cfg: ModelConfig) -> JsonObject:
  keys = _scaled_yarn_to_hf(cfg)
  keys["rope_parameters"][SHARE] = cfg.mla.qk_rope_head_dim / _head_dim(
    cfg.mla.qk_nope_head_dim, cfg.mla.qk_rope_head_dim
  )
  return keys


def _head_dim(qk_nope_head_dim: int, qk_rope_head_dim: int) -> int:
  return qk_nope_head_dim + qk_rope_head_dim


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  num_heads = keys["base_num_query_heads"]
  if keys["base_num_kv_heads"] != num_heads:
    hf.require(num_key_value_heads=num_heads)
  head_dim = _head_dim(keys["qk_nope_head_dim"], keys["qk_rope_head_dim"])
  hf.require(head_dim=head_dim, qk_head_dim=head_dim)
  return {}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  head_dim = _head_dim(cfg.mla.qk_nope_head_dim, cfg.mla.qk_rope_head_dim)
  return {"num_key_value_heads": cfg.base_num_query_heads, "head_dim": head_dim}


MISTRAL4 = dataclasses.replace(
  V3,
  model_type="mistral4",
  architecture="Mistral4ForCausalLM",
  block=(
    *NORMS,
    *LATENT_ATTENTION,
    *mlp("mlp", "mlp"),
    *EXPERTS,
    *mlp("moe/shared_experts", "mlp.shared_experts"),
  ),
  keys=(
    *(key for key in KEYS if key.ours not in ("n_routing_groups", "topk_routing_group")),
    Key("num_experts", "n_routed_experts", alias="num_local_experts"),
    Key("norm_topk_prob", "norm_topk_prob", null=False),
  ),
  ours={"router": "topk_softmax"},
  defaults={
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_parameters": {
      "type": "yarn",
      "factor": 128.0,
      "original_max_position_embeddings": 8192,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "mscale_all_dim": 1.0,
      "mscale": 1.0,
      BETA: 0.1,
    },
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
  },
  required={"n_group": 1, "topk_group": 1, "rope_interleave": True},
  rope_from_hf=_rope_from_hf,
  rope_to_hf=_rope_to_hf,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  mtp=None,
  unread=(),
)
MINISTRAL3 = dataclasses.replace(
  MISTRAL,
  model_type="ministral3",
  architecture="Ministral3ForCausalLM",
  defaults={
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 34,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "rope_parameters": {
      "type": "yarn",
      "rope_theta": 1e6,
      "factor": 16.0,
      "original_max_position_embeddings": 16384,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "mscale_all_dim": 1.0,
      "mscale": 1.0,
      BETA: 0.1,
    },
    "tie_word_embeddings": False,
    "sliding_window": None,
  },
  nullable=("sliding_window",),
  rope_from_hf=_ministral3_rope,
  rope_to_hf=_scaled_yarn_to_hf,
)
FAMILIES = (MISTRAL4, MINISTRAL3)
