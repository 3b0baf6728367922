"""Qwen3 with a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.family import Family


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  shared_mappings.require(hf, use_sliding_window=False)
  shared_mappings.every_layer_is_moe(hf)
  return shared_mappings.decoder_from_hf(hf) | {
    "base_moe_mlp_dim": hf["moe_intermediate_size"],
    "num_experts": hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"],
    "num_experts_per_tok": hf["num_experts_per_tok"],
    "router": "topk_softmax",
    "norm_topk_prob": hf.get("norm_topk_prob", False),
  }


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return shared_mappings.decoder_to_hf(cfg) | {
    # Of dense layers, which this family could have and ours has not.
    "intermediate_size": cfg.moe.base_moe_mlp_dim,
    "moe_intermediate_size": cfg.moe.base_moe_mlp_dim,
    "num_experts": cfg.moe.num_experts,
    "num_experts_per_tok": cfg.moe.num_experts_per_tok,
    "norm_topk_prob": cfg.moe.norm_topk_prob,
    "router_aux_loss_coef": cfg.moe.load_balance_loss_weight,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "use_sliding_window": False,
  }


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  experts = shared_mappings.experts("mlp", gate="gate_proj", up="up_proj", down="down_proj")
  return (*shared_mappings.NORMS, *shared_mappings.ATTENTION, *shared_mappings.QK_NORM, *experts)


FAMILY = Family(
  "qwen3_moe",
  "Qwen3MoeForCausalLM",
  "qwen3_moe",
  config_from_hf,
  config_to_hf,
  block,
  unread=("intermediate_size",),  # of dense layers, of which there are none
)
