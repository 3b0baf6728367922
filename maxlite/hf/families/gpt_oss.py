"""gpt-oss."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.family import Family, Row

NORMS = tuple(row for row in shared_mappings.NORMS if row.ours != "mlp_norm/scale")
ATTENTION_BIAS = (
  *shared_mappings.QKV_BIAS,
  Row("attention/out/bias", "self_attn.o_proj.bias", "d -> d"),
  Row("attention/sinks_bias", "self_attn.sinks", "h -> h"),
)
# Gate and up projections are one tensor, whose columns belong to them by turns.
EXPERTS = (
  Row("moe/router/kernel", "mlp.router.weight", "d e -> e d"),
  Row("moe/router/logits_bias", "mlp.router.bias", "e -> e"),
  Row(("moe/wi_0", "moe/wi_1"), "mlp.experts.gate_up_proj", "g e d f -> e d (f g)"),
  Row(("moe/wi_0_bias", "moe/wi_1_bias"), "mlp.experts.gate_up_proj_bias", "g e f -> e (f g)"),
  Row("moe/wo", "mlp.experts.down_proj", "e f d -> e f d"),
  Row("moe/wo_bias", "mlp.experts.down_proj_bias", "e d -> e d"),
)


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  shared_mappings.require(hf, swiglu_alpha=1.702)
  shared_mappings.require_layer_types(hf, 2)
  return shared_mappings.decoder_from_hf(hf, attention_bias=True) | {
    "base_moe_mlp_dim": hf["intermediate_size"],
    "mlp_activations": ("quick_gelu", "linear_plus_one"),
    "mlp_activations_limit": float(hf.get("swiglu_limit", 7.0)),
    "num_experts": hf["num_local_experts"],
    "num_experts_per_tok": hf["num_experts_per_tok"],
    "expert_bias": True,
    "router": "softmax_topk",
    "norm_topk_prob": True,
    "sliding_window_size": hf.get("sliding_window") or 0,
  }


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return shared_mappings.decoder_to_hf(cfg) | {
    "attention_bias": True,
    "intermediate_size": cfg.moe.base_moe_mlp_dim,
    "num_local_experts": cfg.moe.num_experts,
    "num_experts_per_tok": cfg.moe.num_experts_per_tok,
    "router_aux_loss_coef": cfg.moe.load_balance_loss_weight,
    "swiglu_alpha": 1.702,
    "swiglu_limit": cfg.moe.mlp_activations_limit,
    "sliding_window": cfg.sliding_window_size or None,
    "layer_types": shared_mappings.layer_types(cfg.base_num_decoder_layers, 2),
  }


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  return (*NORMS, *shared_mappings.ATTENTION, *ATTENTION_BIAS, *EXPERTS)


FAMILY = Family(
  "gpt_oss",
  "GptOssForCausalLM",
  "gpt_oss",
  config_from_hf,
  config_to_hf,
  block,
  unread=("experts_per_token", "initial_context_length", "quantization_config"),
  quantized="mxfp4",
)
