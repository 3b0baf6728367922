"""GLM-4.5, 4.6 and 4.7, and GLM-4.5-Air, which has no QK-norm."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import BLOCK, DENSE_KEYS, HfFamily, Key, TensorRule, experts, mlp


def _from_hf(hf: ConfigJson, keys: Mapping[str, Any]) -> dict[str, Any]:
  if hf["use_qk_norm"]:
    return {"decoder_block": "glm4_moe"}
  return {"decoder_block": "glm4_moe_air"}


def _to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return {
    "use_qk_norm": cfg.family.qk_norm == "head",
    "partial_rotary_factor": cfg.rope.partial_rotary_factor,
    "num_nextn_predict_layers": 0,
  }


GLM4_MOE = HfFamily(
  "glm4_moe",
  "Glm4MoeForCausalLM",
  "glm4_moe",
  (
    *BLOCK,
    *experts("mlp"),
    TensorRule("moe/router/bias", "mlp.gate.e_score_correction_bias", "e -> e"),
    *mlp("moe/shared_experts", "mlp.shared_experts"),
  ),
  (
    *DENSE_KEYS,
    Key("base_moe_mlp_dim", "moe_intermediate_size"),
    Key("first_num_dense_layers", "first_k_dense_replace"),
    Key("num_experts", "n_routed_experts", alias="num_local_experts"),
    Key("num_experts_per_tok", "num_experts_per_tok"),
    Key("shared_experts", "n_shared_experts"),
    Key("n_routing_groups", "n_group"),
    Key("topk_routing_group", "topk_group"),
    Key("routed_scaling_factor", "routed_scaling_factor"),
    Key("norm_topk_prob", "norm_topk_prob"),
  ),
  ours={"router": "sigmoid_group_topk", "routed_bias": True},
  defaults={
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
  },
  attention_bias=True,
  variants=("glm4_moe_air",),
  partial_rotary=True,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  # The published draft model is one more layer, which transformers ignores too.
  ignored=(r".*\.rotary_emb\.inv_freq", r"model\.layers\.(46|92)\..*"),
  unread=("num_mtp_layers", "num_nextn_predict_layers"),
)
FAMILIES = (GLM4_MOE,)
