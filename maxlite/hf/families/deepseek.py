"""DeepSeek-V2 and V2-Lite, V3 and R1, and Kimi-K2, which has the architecture of V3."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf.family import DENSE_KEYS, NORMS, HfFamily, Key, TensorRule, experts, mlp

# topk_method of config.json: router.
ROUTERS = {"greedy": "topk_softmax", "group_limited_greedy": "group_limited_greedy"}
LATENT_ATTENTION = (
  TensorRule("attention/query_down/kernel", "self_attn.q_a_proj.weight", "d q -> q d"),
  TensorRule("attention/query_norm/scale", "self_attn.q_a_layernorm.weight", "q -> q"),
  TensorRule("attention/kv_down/kernel", "self_attn.kv_a_proj_with_mqa.weight", "d l -> l d"),
  TensorRule("attention/kv_norm/scale", "self_attn.kv_a_layernorm.weight", "l -> l"),
  TensorRule("attention/kv_up/kernel", "self_attn.kv_b_proj.weight", "l h c -> (h c) l"),
  TensorRule("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
)
KEYS = (
  Key("q_lora_rank", "q_lora_rank", 0, writes_null=True),
  Key("kv_lora_rank", "kv_lora_rank"),
  Key("qk_nope_head_dim", "qk_nope_head_dim"),
  Key("qk_rope_head_dim", "qk_rope_head_dim"),
  Key("v_head_dim", "v_head_dim"),
  *DENSE_KEYS,
  Key("base_moe_mlp_dim", "moe_intermediate_size"),
  Key("first_num_dense_layers", "first_k_dense_replace", 0),
  Key("num_experts", "n_routed_experts"),
  Key("num_experts_per_tok", "num_experts_per_tok"),
  Key("shared_experts", "n_shared_experts", 0),
  Key("n_routing_groups", "n_group", 1),
  Key("topk_routing_group", "topk_group", 1),
  Key("routed_scaling_factor", "routed_scaling_factor", 1.0),
)


def _extra_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return {
    "num_key_value_heads": cfg.base_num_query_heads,
    "head_dim": cfg.mla.qk_rope_head_dim,
    "seq_aux": True,
  }


def _v2_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  methods = {router: method for method, router in ROUTERS.items()}
  method = methods.get(cfg.moe.router, "greedy")
  return _extra_to_hf(cfg) | {"topk_method": method, "norm_topk_prob": False}


def _query(cfg: ModelConfig) -> Sequence[TensorRule]:
  name = "q_b_proj" if cfg.mla.q_lora_rank else "q_proj"
  return (TensorRule("attention/query/kernel", f"self_attn.{name}.weight", "d h c -> (h c) d"),)


V2 = HfFamily(
  "deepseek_v2",
  "DeepseekV2ForCausalLM",
  "deepseek",
  (
    *NORMS,
    *LATENT_ATTENTION,
    *mlp("mlp", "mlp"),
    *experts("mlp"),
    *mlp("moe/shared_experts", "mlp.shared_experts"),
  ),
  KEYS,
  ours={"norm_topk_prob": False},
  required={"scoring_func": "softmax", "moe_layer_freq": 1},
  aux_loss_key="aux_loss_alpha",
  extra_from_hf=lambda hf, keys: {"router": ROUTERS[hf.get("topk_method", "greedy")]},
  extra_to_hf=_v2_to_hf,
  extra_block=_query,
  unread=("norm_topk_prob",),
)
V3 = dataclasses.replace(
  V2,
  model_type="deepseek_v3",
  architecture="DeepseekV3ForCausalLM",
  block=(*V2.block, TensorRule("moe/router/bias", "mlp.gate.e_score_correction_bias", "e -> e")),
  keys=(*KEYS, Key("norm_topk_prob", "norm_topk_prob", True)),
  ours={"router": "sigmoid_group_topk", "routed_bias": True},
  required={
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rope_interleave": True,
    "moe_layer_freq": 1,
  },
  extra_from_hf=lambda hf, keys: {},
  extra_to_hf=lambda cfg: _extra_to_hf(cfg) | {"num_nextn_predict_layers": 0},
  # The published draft model is one more layer, which transformers ignores too.
  ignored=(*V2.ignored, r"model\.layers\.61\..*"),
  unread=("num_nextn_predict_layers",),
)
FAMILIES = (V2, V3, dataclasses.replace(V3, model_type="kimi_k2"))
