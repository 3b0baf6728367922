"""Qwen3 with a mixture of experts in every layer."""

from maxlite.hf.config_keys import Key
from maxlite.hf.family import HfFamily
from maxlite.hf.shared_mappings import ATTENTION, NORM_TOPK_PROB, NORMS, QK_NORM, experts

FAMILY = HfFamily(
  "qwen3_moe",
  "Qwen3MoeForCausalLM",
  "qwen3_moe",
  (*NORMS, *ATTENTION, *QK_NORM, *experts("mlp")),
  (
    Key("base_moe_mlp_dim", "moe_intermediate_size"),
    Key("num_experts", "num_experts", alias="num_local_experts"),
    Key("num_experts_per_tok", "num_experts_per_tok"),
    NORM_TOPK_PROB,
  ),
  ours={"router": "topk_softmax"},
  required={"use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
  aux_loss_key="router_aux_loss_coef",
  # Of dense layers, which are not supported.
  extra_to_hf=lambda cfg: {"intermediate_size": cfg.moe.base_moe_mlp_dim},
  unread=("intermediate_size",),
)
