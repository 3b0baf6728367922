"""Mixtral."""

from maxlite.hf.config_keys import Key
from maxlite.hf.family import HfFamily
from maxlite.hf.shared_mappings import ATTENTION, MOE_KEYS, NORMS, experts

FAMILY = HfFamily(
  "mixtral",
  "MixtralForCausalLM",
  "mixtral",
  (*NORMS, *ATTENTION, *experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
  (*MOE_KEYS, Key("num_experts", "num_local_experts")),
  ours={"router": "softmax_topk", "norm_topk_prob": True},
  required={"sliding_window": None},
  aux_loss_key="router_aux_loss_coef",
)
