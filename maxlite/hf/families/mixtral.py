"""Mixtral, OLMoE and Qwen3-MoE: layers of Llama with a mixture of experts in every layer."""

from collections.abc import Mapping

from maxlite.config.errors import UserError
from maxlite.config.json_values import Json, JsonObject
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import BLOCK, MOE_KEYS, NORM_TOPK_PROB, HfFamily, Key, experts

MIXTRAL = HfFamily(
  "mixtral",
  "MixtralForCausalLM",
  "mixtral",
  (*BLOCK, *experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
  (*MOE_KEYS, Key("num_experts", "num_local_experts", alias="num_experts")),
  ours={"router": "softmax_topk", "norm_topk_prob": True},
  defaults={
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
  },
  nullable=("head_dim",),
  required={"sliding_window": None},
  aux_loss_key="router_aux_loss_coef",
)
OLMOE = HfFamily(
  "olmoe",
  "OlmoeForCausalLM",
  "olmoe",
  (*BLOCK, *experts("mlp")),
  (*MOE_KEYS, Key("num_experts", "num_experts", alias="num_local_experts"), NORM_TOPK_PROB),
  ours={"router": "topk_softmax"},
  defaults={
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "clip_qkv": None,
    "num_experts_per_tok": 8,
    "num_experts": 64,
    "norm_topk_prob": False,
  },
  nullable=("num_key_value_heads",),
  required={"clip_qkv": None},
  aux_loss_key="router_aux_loss_coef",
)


def _require_no_dense_layers(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  if hf.get("mlp_only_layers"):
    raise UserError(
      f"config.json has mlp_only_layers={hf.get('mlp_only_layers')}, but maxlite supports only "
      "experts in every layer here: choose another checkpoint"
    )
  return {}


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
  defaults={
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": False,
  },
  required={"use_sliding_window": False, "decoder_sparse_step": 1},
  aux_loss_key="router_aux_loss_coef",
  extra_from_hf=_require_no_dense_layers,
  extra_to_hf=lambda cfg: {
    "intermediate_size": cfg.moe.base_moe_mlp_dim,
    "mlp_only_layers": [],
  },
  # Of dense layers, which are not supported, and of use_sliding_window.
  unread=("intermediate_size", "max_window_layers", "sliding_window"),
)
FAMILIES = (MIXTRAL, OLMOE, QWEN3_MOE)
