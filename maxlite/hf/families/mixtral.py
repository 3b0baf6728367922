"""Mixtral, OLMoE and Qwen3-MoE: layers of Llama with a mixture of experts in every layer."""

from maxlite.hf.family import BLOCK, MOE_KEYS, NORM_TOPK_PROB, HfFamily, Key, experts

MIXTRAL = HfFamily(
  "mixtral",
  "MixtralForCausalLM",
  "mixtral",
  (*BLOCK, *experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
  (*MOE_KEYS, Key("num_experts", "num_local_experts")),
  ours={"router": "softmax_topk", "norm_topk_prob": True},
  required={"sliding_window": None},
  aux_loss_key="router_aux_loss_coef",
)
OLMOE = HfFamily(
  "olmoe",
  "OlmoeForCausalLM",
  "olmoe",
  (*BLOCK, *experts("mlp")),
  (*MOE_KEYS, Key("num_experts", "num_experts"), NORM_TOPK_PROB),
  ours={"router": "topk_softmax"},
  required={"clip_qkv": None},
  aux_loss_key="router_aux_loss_coef",
)
QWEN3_MOE = HfFamily(
  "qwen3_moe",
  "Qwen3MoeForCausalLM",
  "qwen3_moe",
  (*BLOCK, *experts("mlp")),
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
FAMILIES = (MIXTRAL, OLMOE, QWEN3_MOE)
