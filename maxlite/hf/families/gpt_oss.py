"""gpt-oss."""

from collections.abc import Mapping

from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import BLOCK, MOE_KEYS, SLIDING_WINDOW, HfFamily, Key, TensorRule
from maxlite.storage.json_values import Json, JsonObject

RULES = (
  TensorRule("attention/out/bias", "self_attn.o_proj.bias", "d -> d"),
  TensorRule("attention/sinks_bias", "self_attn.sinks", "h -> h"),
  TensorRule("moe/router/kernel", "mlp.router.weight", "d e -> e d"),
  TensorRule("moe/router/logits_bias", "mlp.router.bias", "e -> e"),
  # Gate and up projections are one tensor with alternating columns.
  TensorRule(("moe/wi_0", "moe/wi_1"), "mlp.experts.gate_up_proj", "g e d f -> e d (f g)"),
  TensorRule(
    ("moe/wi_0_bias", "moe/wi_1_bias"), "mlp.experts.gate_up_proj_bias", "g e f -> e (f g)"
  ),
  TensorRule("moe/wo", "mlp.experts.down_proj", "e f d -> e f d"),
  TensorRule("moe/wo_bias", "mlp.experts.down_proj_bias", "e d -> e d"),
)

_NO_LIMIT = 65504.0  # the largest float16; transformers clamps to swiglu_limit in any case


def _limit_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  if keys["mlp_activations_limit"] == _NO_LIMIT:
    return {"mlp_activations_limit": 0.0}
  return {}


GPT_OSS = HfFamily(
  "gpt_oss",
  "GptOssForCausalLM",
  "gpt_oss",
  (*BLOCK, *RULES),
  (
    *MOE_KEYS,
    Key("num_experts", "num_local_experts", alias="num_experts"),
    Key("mlp_activations_limit", "swiglu_limit", off=0.0),
    SLIDING_WINDOW,
  ),
  ours={
    "mlp_activations": ("quick_gelu", "linear_plus_one"),
    "expert_bias": True,
    "router": "softmax_topk",
    "norm_topk_prob": True,
  },
  defaults={
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "rope_parameters": {
      "rope_type": "yarn",
      "factor": 32.0,
      "beta_fast": 32.0,
      "beta_slow": 1.0,
      "truncate": False,
      "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": None,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
  },
  required={"swiglu_alpha": 1.702},
  checks_layer_types=True,
  aux_loss_key="router_aux_loss_coef",
  extra_from_hf=_limit_from_hf,
  extra_to_hf=lambda cfg: {"swiglu_limit": cfg.moe.mlp_activations_limit or _NO_LIMIT},
  unread=("experts_per_token", "initial_context_length"),
  quantized="mxfp4",
)
FAMILIES = (GPT_OSS,)
