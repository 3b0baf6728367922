"""OLMo 2 and 3 and FlexOlmo, whose norms are after attention and MLP or experts only."""

import dataclasses

from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  ATTENTION,
  DENSE_KEYS,
  MOE_KEYS,
  NORM_TOPK_PROB,
  QK_NORM,
  SLIDING_WINDOW,
  HfFamily,
  Key,
  TensorRule,
  experts,
  mlp,
)
from maxlite.hf.hf_rope import layered_rope_from_hf, layered_rope_to_hf
from maxlite.storage.json_values import JsonObject

BLOCK = (
  *ATTENTION,
  *QK_NORM,
  TensorRule("attention_post_norm/scale", "post_attention_layernorm.weight", "d -> d"),
  *mlp("mlp", "mlp"),
  TensorRule("mlp_post_norm/scale", "post_feedforward_layernorm.weight", "d -> d"),
)
_DEFAULTS = {
  "vocab_size": 50304,
  "hidden_size": 4096,
  "intermediate_size": 11008,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": None,
  "hidden_act": "silu",
  "max_position_embeddings": 2048,
  "rms_norm_eps": 1e-5,
  "tie_word_embeddings": False,
  "attention_bias": False,
}


def _olmo3_rope(hf: ConfigJson) -> JsonObject:
  # transformers gives local layers the default base, whatever the file's rope_theta is.
  return layered_rope_from_hf(hf, hf.default("rope_theta"))


OLMO2 = HfFamily(
  "olmo2",
  "Olmo2ForCausalLM",
  "olmo2",
  BLOCK,
  DENSE_KEYS,
  defaults=_DEFAULTS | {"rope_theta": 10_000.0},
  nullable=("num_key_value_heads",),
)
OLMO3 = dataclasses.replace(
  OLMO2,
  model_type="olmo3",
  architecture="Olmo3ForCausalLM",
  decoder_block="olmo3",
  keys=(*DENSE_KEYS, SLIDING_WINDOW),
  defaults=_DEFAULTS
  | {
    "rope_theta": 500_000.0,
    "sliding_window": 4096,
    "layer_types": None,
  },
  checks_layer_types=True,
  rope_from_hf=_olmo3_rope,
  rope_to_hf=layered_rope_to_hf,
)
FLEX_OLMO = dataclasses.replace(
  OLMO2,
  model_type="flex_olmo",
  architecture="FlexOlmoForCausalLM",
  decoder_block="flex_olmo",
  block=(
    *BLOCK,
    *experts("mlp"),
    TensorRule("moe_post_norm/scale", "post_feedforward_layernorm.weight", "d -> d"),
  ),
  keys=(
    *MOE_KEYS,
    Key("num_experts", "num_experts", alias="num_local_experts"),
    NORM_TOPK_PROB,
  ),
  ours={"router": "topk_softmax"},
  defaults=_DEFAULTS
  | {
    "vocab_size": 100352,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
    "num_experts_per_tok": 5,
    "num_experts": 7,
    "norm_topk_prob": False,
  },
  aux_loss_key="router_aux_loss_coef",
)
FAMILIES = (OLMO2, OLMO3, FLEX_OLMO)
