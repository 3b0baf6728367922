"""dots.llm1: attention of Qwen3 and the mixture of experts of DeepSeek-V3."""

from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import BLOCK, DENSE_KEYS, HfFamily, Key, TensorRule, experts, mlp
from maxlite.storage.json_values import Json, JsonObject


def _require_global_layers(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Refuse windows: by default, layers from number `max_window_layers` on have one."""
  num_layers = keys["base_num_decoder_layers"]
  sliding_window = hf.get("sliding_window")
  first_local = hf.get("max_window_layers")
  if hf.get("layer_types") is not None:
    hf.require(layer_types=["full_attention"] * num_layers)
  elif sliding_window is not None and not (first_local is not None and first_local >= num_layers):
    hf.require(sliding_window=None)
  return {}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  num_layers = cfg.base_num_decoder_layers
  return {
    "layer_types": ["full_attention"] * num_layers,
    "max_window_layers": num_layers,
    "sliding_window": None,
  }


DOTS1 = HfFamily(
  "dots1",
  "Dots1ForCausalLM",
  "qwen3_moe",
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
    Key("norm_topk_prob", "norm_topk_prob", null=False),
  ),
  ours={"router": "sigmoid_group_topk", "routed_bias": True},
  defaults={
    "vocab_size": 152064,
    "hidden_size": 4608,
    "intermediate_size": 10944,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "sliding_window": 4096,
    "max_window_layers": 62,
    "layer_types": None,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": None,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
  },
  nullable=("num_key_value_heads", "norm_topk_prob"),
  required={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
  extra_from_hf=_require_global_layers,
  extra_to_hf=_to_hf,
)
FAMILIES = (DOTS1,)
