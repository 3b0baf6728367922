"""MiniMax-M2, M2.1 and M2.5."""

from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import BLOCK, MOE_KEYS, HfFamily, Key, TensorRule, experts
from maxlite.hf.hf_rope import rope_from_hf
from maxlite.storage.json_values import JsonObject

FACTOR = "partial_rotary_factor"


def _rope_from_hf(hf: ConfigJson) -> JsonObject:
  """Return our keys of the rotary embedding.

  Published files have the number of rotated channels in `rotary_dim`, which is read where the file
  has no partial_rotary_factor.
  """
  keys = rope_from_hf(hf)
  rotary_dim = hf.get("rotary_dim")
  parameters = hf.get("rope_parameters") or {}
  scaling = hf.get("rope_scaling") or {}
  is_given = FACTOR in hf or FACTOR in (scaling or parameters)
  if rotary_dim is None or is_given:
    return keys
  return keys | {FACTOR: rotary_dim / hf["head_dim"]}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  return {"rotary_dim": int(cfg.head_dim * cfg.rope.partial_rotary_factor)}


MINIMAX_M2 = HfFamily(
  "minimax_m2",
  "MiniMaxM2ForCausalLM",
  "olmoe",
  (
    *BLOCK,
    *experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    TensorRule("moe/router/bias", "block_sparse_moe.e_score_correction_bias", "e -> e"),
  ),
  (*MOE_KEYS, Key("num_experts", "num_local_experts", alias="num_experts")),
  ours={"router": "sigmoid_group_topk", "routed_bias": True, "norm_topk_prob": True},
  defaults={
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 196608,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 8,
    "num_local_experts": 256,
  },
  required={
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
  },
  partial_rotary=True,
  aux_loss_key="router_aux_loss_coef",
  rope_from_hf=_rope_from_hf,
  extra_to_hf=_to_hf,
  # transformers reads none of these: they describe the draft layers, which no file has weights of,
  # and kinds of attention, experts and norms that this model does not have.
  unread=(
    "attn_type_list",
    "layernorm_full_attention_beta",
    "layernorm_linear_attention_beta",
    "layernorm_mlp_beta",
    "max_model_len",
    "mlp_intermediate_size",
    "mtp_transformer_layers",
    "num_mtp_modules",
    "shared_moe_mode",
    "swa_rope_theta",
    "use_mtp",
  ),
)
FAMILIES = (MINIMAX_M2,)
