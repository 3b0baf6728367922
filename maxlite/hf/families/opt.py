"""OPT and StarCoder2: layers of GPT-2 with learned or rotated positions."""

from collections.abc import Mapping

from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  ATTENTION,
  DECODER_KEYS,
  DENSE_KEYS,
  QKV_BIAS,
  SLIDING_WINDOW,
  HfFamily,
  Key,
  TensorRule,
  equal_heads_from_hf,
  layer_norm,
  no_rope,
  plain_mlp,
)
from maxlite.storage.json_values import Json, JsonObject

OPT_BLOCK = (
  *layer_norm("attention_norm", "self_attn_layer_norm"),
  *layer_norm("mlp_norm", "final_layer_norm"),
  *ATTENTION[:-1],
  *QKV_BIAS,
  TensorRule("attention/out/kernel", "self_attn.out_proj.weight", "h c d -> d (h c)"),
  TensorRule("attention/out/bias", "self_attn.out_proj.bias", "d -> d"),
  *plain_mlp("mlp", "fc1", "fc2"),
)


def _opt_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  if hf["word_embed_proj_dim"] is not None:
    hf.require(word_embed_proj_dim=hf["hidden_size"])
  return {}


OPT = HfFamily(
  "opt",
  "OPTForCausalLM",
  "opt",
  OPT_BLOCK,
  (
    Key("base_mlp_dim", "ffn_dim"),
    Key("trainable_position_size", "max_position_embeddings"),
  ),
  decoder_keys=DECODER_KEYS[:-1],
  ours={"normalization_layer_epsilon": 1e-5},  # no key sets it
  defaults={
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "num_attention_heads": 12,
    "activation_function": "relu",
    "tie_word_embeddings": True,
    "word_embed_proj_dim": None,
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
  },
  nullable=("word_embed_proj_dim",),
  required={
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
  },
  activation="",
  is_gated=False,
  activation_key="activation_function",
  extra_from_hf=_opt_from_hf,
  rope_from_hf=no_rope,
  rope_to_hf=no_rope,
  heads_from_hf=equal_heads_from_hf("num_attention_heads", "hidden_size"),
  outer=(
    TensorRule("embed/embedding", "model.decoder.embed_tokens.weight", "v d -> v d"),
    TensorRule("position_embed/embedding", "model.decoder.embed_positions.weight", "p d -> p d"),
    *layer_norm("final_norm", "model.decoder.final_layer_norm"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
  ),
  layer_prefix="model.decoder.layers.{layer}.",
  base_prefix="model.",
  unread=("activation_dropout", "dropout", "init_std", "layerdrop"),
  unwritten=("num_key_value_heads", "head_dim", "attention_bias"),
)

STARCODER2_BLOCK = (
  *layer_norm("attention_norm", "input_layernorm"),
  *layer_norm("mlp_norm", "post_attention_layernorm"),
  *ATTENTION,
  *QKV_BIAS,
  TensorRule("attention/out/bias", "self_attn.o_proj.bias", "d -> d"),
  *plain_mlp("mlp", "mlp.c_fc", "mlp.c_proj"),
)
STARCODER2 = HfFamily(
  "starcoder2",
  "Starcoder2ForCausalLM",
  "starcoder2",
  STARCODER2_BLOCK,
  (*DENSE_KEYS, SLIDING_WINDOW),
  decoder_keys=(*DECODER_KEYS[:-1], Key("normalization_layer_epsilon", "norm_epsilon")),
  defaults={
    "vocab_size": 49152,
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "num_hidden_layers": 30,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "use_bias": True,
  },
  nullable=("sliding_window",),
  required={"use_bias": True},
  activation="",
  is_gated=False,
  outer=(
    TensorRule("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
    *layer_norm("final_norm", "model.norm"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
  ),
  # mlp_type names the MLP that every model of this type has.
  unread=("activation_function", "embedding_dropout", "mlp_type", "norm_type", "residual_dropout"),
  unwritten=("attention_bias",),
)
FAMILIES = (OPT, STARCODER2)
