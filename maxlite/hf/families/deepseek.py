"""DeepSeek-V2 and V2-Lite, V3 and R1, and Kimi-K2, which has the architecture of V3."""

import dataclasses
from collections.abc import Mapping, Sequence

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  DENSE_KEYS,
  MTP_LAYER,
  NORMS,
  HfFamily,
  Key,
  TensorRule,
  experts,
  mlp,
)
from maxlite.storage.json_values import Json, JsonObject

# Our router by the topk_method of config.json.
ROUTERS = {"greedy": "topk_softmax", "group_limited_greedy": "group_limited_greedy"}
LATENT_ATTENTION = (
  TensorRule("attention/query_down/kernel", "self_attn.q_a_proj.weight", "d q -> q d"),
  TensorRule("attention/query_norm/scale", "self_attn.q_a_layernorm.weight", "q -> q"),
  TensorRule("attention/kv_down/kernel", "self_attn.kv_a_proj_with_mqa.weight", "d l -> l d"),
  TensorRule("attention/kv_norm/scale", "self_attn.kv_a_layernorm.weight", "l -> l"),
  TensorRule("attention/kv_up/kernel", "self_attn.kv_b_proj.weight", "l h c -> (h c) l"),
  TensorRule("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
)
KEYS = (
  Key("q_lora_rank", "q_lora_rank", null=0, off=0),
  Key("kv_lora_rank", "kv_lora_rank"),
  Key("qk_nope_head_dim", "qk_nope_head_dim"),
  Key("qk_rope_head_dim", "qk_rope_head_dim"),
  Key("v_head_dim", "v_head_dim"),
  *DENSE_KEYS,
  Key("base_moe_mlp_dim", "moe_intermediate_size"),
  Key("first_num_dense_layers", "first_k_dense_replace"),
  Key("num_experts_per_tok", "num_experts_per_tok"),
  Key("shared_experts", "n_shared_experts"),
  Key("n_routing_groups", "n_group", null=1),
  Key("topk_routing_group", "topk_group", null=1),
  Key("routed_scaling_factor", "routed_scaling_factor"),
)


def _extra_to_hf(cfg: ModelConfig) -> JsonObject:
  return {
    "num_key_value_heads": cfg.base_num_query_heads,
    "head_dim": cfg.mla.qk_rope_head_dim,
    "seq_aux": True,
  }


def _v2_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  _require_all_heads(keys)
  method = hf["topk_method"]
  if method not in ROUTERS:
    raise UserError(
      f"config.json has topk_method={method!r}, but supported are {', '.join(ROUTERS)}: choose "
      "another checkpoint"
    )
  if method == "group_limited_greedy":
    for name in ("n_group", "topk_group"):
      if hf[name] is None:
        raise UserError(f"config.json has {name}=null, but topk_method={method} needs a number")
  return {"router": ROUTERS[method]}


def v3_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Refuse a number of key/value heads or a head_dim that latent attention cannot have."""
  _require_all_heads(keys)
  num_rotated = keys["qk_rope_head_dim"]
  if "head_dim" in hf and hf["head_dim"] != num_rotated:
    raise UserError(
      f"config.json has head_dim={hf['head_dim']} and qk_rope_head_dim={num_rotated}, of which the "
      "first follows from the second in latent attention: remove head_dim, or write that number"
    )
  return {}


def _require_all_heads(keys: Mapping[str, Json]) -> None:
  if keys["base_num_kv_heads"] != keys["base_num_query_heads"]:
    raise UserError(
      f"config.json implies num_key_value_heads={keys['base_num_kv_heads']}, but latent attention "
      f"has as many as num_attention_heads={keys['base_num_query_heads']}: write that number"
    )


def _v2_to_hf(cfg: ModelConfig) -> JsonObject:
  methods = {router: method for method, router in ROUTERS.items()}
  method = methods.get(cfg.moe.router, "greedy")
  return _extra_to_hf(cfg) | {"topk_method": method, "norm_topk_prob": False}


def v3_to_hf(cfg: ModelConfig) -> JsonObject:
  """Return keys that have one value, or follow from others."""
  return _extra_to_hf(cfg)


def _query(cfg: ModelConfig) -> Sequence[TensorRule]:
  """Return the rule of the projection to queries, whose name depends on the query latent."""
  name = "q_proj"
  if cfg.mla.q_lora_rank:
    name = "q_b_proj"
  return (TensorRule("attention/query/kernel", f"self_attn.{name}.weight", "d h c -> (h c) d"),)


V2 = HfFamily(
  "deepseek_v2",
  "DeepseekV2ForCausalLM",
  "deepseek",
  (
    *NORMS,
    *LATENT_ATTENTION,
    *mlp("mlp", "mlp"),
    *experts("mlp"),
    *mlp("moe/shared_experts", "mlp.shared_experts"),
  ),
  (*KEYS, Key("num_experts", "n_routed_experts", alias="num_experts")),
  ours={"norm_topk_prob": False},
  defaults={
    "vocab_size": 102400,
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
    "mlp_bias": False,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": None,
    "topk_group": None,
    "topk_method": "greedy",
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": None,
    "moe_intermediate_size": 1407,
    "routed_scaling_factor": 1.0,
  },
  nullable=("num_key_value_heads", "q_lora_rank", "n_group", "topk_group"),
  required={"scoring_func": "softmax", "moe_layer_freq": 1},
  aux_loss_key="aux_loss_alpha",
  extra_from_hf=_v2_from_hf,
  extra_to_hf=_v2_to_hf,
  extra_block=_query,
  unread=("head_dim", "norm_topk_prob", "qk_head_dim"),
)
V3 = dataclasses.replace(
  V2,
  model_type="deepseek_v3",
  architecture="DeepseekV3ForCausalLM",
  block=(*V2.block, TensorRule("moe/router/bias", "mlp.gate.e_score_correction_bias", "e -> e")),
  keys=(
    *KEYS,
    Key("num_experts", "n_routed_experts", alias="num_local_experts"),
    Key("norm_topk_prob", "norm_topk_prob", null=False),
  ),
  ours={"router": "sigmoid_group_topk", "routed_bias": True},
  defaults={
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_interleave": True,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
  },
  nullable=("num_key_value_heads", "q_lora_rank", "norm_topk_prob"),
  required={
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "moe_layer_freq": 1,
  },
  extra_from_hf=v3_from_hf,
  extra_to_hf=v3_to_hf,
  mtp=MTP_LAYER,
  unread=("num_mtp_layers", "qk_head_dim"),
)
# transformers has no class of this type: its files have every key.
KIMI_K2 = dataclasses.replace(
  V3, model_type="kimi_k2", class_type="deepseek_v3", defaults={"rope_theta": 10_000.0}
)
FAMILIES = (V2, V3, KIMI_K2)
