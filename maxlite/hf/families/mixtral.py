"""Mixtral."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.family import Family


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  shared_mappings.require(hf, sliding_window=None)
  return shared_mappings.decoder_from_hf(hf) | {
    "base_moe_mlp_dim": hf["intermediate_size"],
    "num_experts": hf["num_local_experts"],
    "num_experts_per_tok": hf["num_experts_per_tok"],
    "router": "softmax_topk",
    "norm_topk_prob": True,
  }


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return shared_mappings.decoder_to_hf(cfg) | {
    "intermediate_size": cfg.moe.base_moe_mlp_dim,
    "num_local_experts": cfg.moe.num_experts,
    "num_experts_per_tok": cfg.moe.num_experts_per_tok,
    "router_aux_loss_coef": cfg.moe.load_balance_loss_weight,
    "sliding_window": None,
  }


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  experts = shared_mappings.experts("block_sparse_moe", gate="w1", up="w3", down="w2")
  return (*shared_mappings.NORMS, *shared_mappings.ATTENTION, *experts)


FAMILY = Family("mixtral", "MixtralForCausalLM", "mixtral", config_from_hf, config_to_hf, block)
