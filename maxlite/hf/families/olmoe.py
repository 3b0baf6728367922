"""OLMoE."""

from maxlite.hf.config_keys import Key
from maxlite.hf.family import HfFamily
from maxlite.hf.shared_mappings import ATTENTION, MOE_KEYS, NORM_TOPK_PROB, NORMS, QK_NORM, experts

FAMILY = HfFamily(
  "olmoe",
  "OlmoeForCausalLM",
  "olmoe",
  (*NORMS, *ATTENTION, *QK_NORM, *experts("mlp")),
  (*MOE_KEYS, Key("num_experts", "num_experts"), NORM_TOPK_PROB),
  ours={"router": "topk_softmax"},
  required={"clip_qkv": None},
  aux_loss_key="router_aux_loss_coef",
)
