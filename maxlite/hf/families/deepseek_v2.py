"""DeepSeek-V2 and V2-Lite."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.family import Family, Row

# topk_method of config.json: router.
ROUTERS = {"greedy": "topk_softmax", "group_limited_greedy": "group_limited_greedy"}
LATENT_ATTENTION = (
  Row("attention/query_down/kernel", "self_attn.q_a_proj.weight", "d q -> q d"),
  Row("attention/query_norm/scale", "self_attn.q_a_layernorm.weight", "q -> q"),
  Row("attention/kv_down/kernel", "self_attn.kv_a_proj_with_mqa.weight", "d l -> l d"),
  Row("attention/kv_norm/scale", "self_attn.kv_a_layernorm.weight", "l -> l"),
  Row("attention/kv_up/kernel", "self_attn.kv_b_proj.weight", "l h c -> (h c) l"),
  Row("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
)


def latent_attention_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Keys of multi-head latent attention."""
  return {
    "q_lora_rank": hf.get("q_lora_rank") or 0,
    "kv_lora_rank": hf["kv_lora_rank"],
    "qk_nope_head_dim": hf["qk_nope_head_dim"],
    "qk_rope_head_dim": hf["qk_rope_head_dim"],
    "v_head_dim": hf["v_head_dim"],
  }


def latent_attention_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """The inverse of latent_attention_from_hf."""
  return {
    "q_lora_rank": cfg.mla.q_lora_rank or None,
    "kv_lora_rank": cfg.mla.kv_lora_rank,
    "qk_nope_head_dim": cfg.mla.qk_nope_head_dim,
    "qk_rope_head_dim": cfg.mla.qk_rope_head_dim,
    "v_head_dim": cfg.mla.v_head_dim,
    "num_key_value_heads": cfg.base_num_query_heads,
    "head_dim": cfg.mla.qk_rope_head_dim,
  }


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  shared_mappings.require(hf, scoring_func="softmax")
  return shared_from_hf(hf) | {
    "router": ROUTERS[hf.get("topk_method", "greedy")],
    "norm_topk_prob": False,
  }


def shared_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Keys of V2 and V3."""
  shared_mappings.require(hf, moe_layer_freq=1)
  return {
    **shared_mappings.decoder_from_hf(hf),
    **latent_attention_from_hf(hf),
    "base_mlp_dim": hf["intermediate_size"],
    "base_moe_mlp_dim": hf["moe_intermediate_size"],
    "first_num_dense_layers": hf.get("first_k_dense_replace", 0),
    "num_experts": hf["n_routed_experts"],
    "num_experts_per_tok": hf["num_experts_per_tok"],
    "shared_experts": hf.get("n_shared_experts") or 0,
    "n_routing_groups": hf.get("n_group") or 1,
    "topk_routing_group": hf.get("topk_group") or 1,
    "routed_scaling_factor": float(hf.get("routed_scaling_factor", 1.0)),
  }


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  moe = cfg.moe
  methods = {router: method for method, router in ROUTERS.items()}
  return {
    **shared_mappings.decoder_to_hf(cfg),
    **latent_attention_to_hf(cfg),
    "intermediate_size": cfg.base_mlp_dim,
    "moe_intermediate_size": moe.base_moe_mlp_dim,
    "first_k_dense_replace": moe.first_num_dense_layers,
    "moe_layer_freq": 1,
    "n_routed_experts": moe.num_experts,
    "num_experts_per_tok": moe.num_experts_per_tok,
    "n_shared_experts": moe.shared_experts,
    "scoring_func": "softmax",
    "topk_method": methods.get(moe.router, "greedy"),
    "n_group": moe.n_routing_groups,
    "topk_group": moe.topk_routing_group,
    "norm_topk_prob": False,
    "routed_scaling_factor": moe.routed_scaling_factor,
    "aux_loss_alpha": moe.load_balance_loss_weight,
    "seq_aux": True,
  }


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  query = "q_b_proj" if cfg.mla.q_lora_rank else "q_proj"
  return (
    *shared_mappings.NORMS,
    *LATENT_ATTENTION,
    Row("attention/query/kernel", f"self_attn.{query}.weight", "d h c -> (h c) d"),
    *shared_mappings.mlp("mlp", "mlp"),
    *shared_mappings.experts("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    *shared_mappings.mlp("moe/shared_experts", "mlp.shared_experts"),
  )


FAMILY = Family(
  "deepseek_v2",
  "DeepseekV2ForCausalLM",
  "deepseek",
  config_from_hf,
  config_to_hf,
  block,
  unread=("norm_topk_prob",),
)
