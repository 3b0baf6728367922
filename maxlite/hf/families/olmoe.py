"""OLMoE."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.family import Family


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  shared_mappings.require(hf, clip_qkv=None)
  return shared_mappings.decoder_from_hf(hf) | {
    "base_moe_mlp_dim": hf["intermediate_size"],
    "num_experts": hf["num_experts"],
    "num_experts_per_tok": hf["num_experts_per_tok"],
    "router": "topk_softmax",
    "norm_topk_prob": hf.get("norm_topk_prob", False),
  }


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return shared_mappings.decoder_to_hf(cfg) | {
    "intermediate_size": cfg.moe.base_moe_mlp_dim,
    "num_experts": cfg.moe.num_experts,
    "num_experts_per_tok": cfg.moe.num_experts_per_tok,
    "norm_topk_prob": cfg.moe.norm_topk_prob,
    "router_aux_loss_coef": cfg.moe.load_balance_loss_weight,
    "clip_qkv": None,
  }


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  experts = shared_mappings.experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
  return (*shared_mappings.NORMS, *shared_mappings.ATTENTION, *shared_mappings.QK_NORM, *experts)


FAMILY = Family("olmoe", "OlmoeForCausalLM", "olmoe", config_from_hf, config_to_hf, block)
