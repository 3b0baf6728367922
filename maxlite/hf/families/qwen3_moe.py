"""Qwen3 with a mixture of experts in every layer."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.hf.config_keys import Key
from maxlite.hf.family import HfFamily
from maxlite.hf.shared_mappings import ATTENTION, NORM_TOPK_PROB, NORMS, QK_NORM, experts


def _extra_from_hf(hf: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
  if hf.get("mlp_only_layers"):
    raise UserError("config.json has mlp_only_layers, which maxlite does not support")
  return {"num_experts": hf["num_experts"] if "num_experts" in hf else hf["num_local_experts"]}


def _extra_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return {
    "num_experts": cfg.moe.num_experts,
    "intermediate_size": cfg.moe.base_moe_mlp_dim,  # of dense layers, unsupported
    "mlp_only_layers": [],
  }


FAMILY = HfFamily(
  "qwen3_moe",
  "Qwen3MoeForCausalLM",
  "qwen3_moe",
  (*NORMS, *ATTENTION, *QK_NORM, *experts("mlp")),
  (
    Key("base_moe_mlp_dim", "moe_intermediate_size"),
    Key("num_experts_per_tok", "num_experts_per_tok"),
    NORM_TOPK_PROB,
  ),
  ours={"router": "topk_softmax"},
  required={"use_sliding_window": False, "decoder_sparse_step": 1},
  aux_loss_key="router_aux_loss_coef",
  extra_from_hf=_extra_from_hf,
  extra_to_hf=_extra_to_hf,
  unread=("intermediate_size",),  # of dense layers
)
