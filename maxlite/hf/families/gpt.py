"""GPT-2 and GPT-NeoX with Pythia: LayerNorm, and MLPs without a gate, both with biases."""

from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  DECODER_KEYS,
  DENSE_KEYS,
  HfFamily,
  Key,
  TensorRule,
  equal_heads_from_hf,
  layer_norm,
  no_rope,
  plain_mlp,
)
from maxlite.hf.hf_rope import dict_of, read_rope, rope_to_hf
from maxlite.storage.json_values import Json, JsonObject

# Buffers of older files: the causal mask and the score of hidden positions.
MASKS = (r".*\.(attn|attention)\.(masked_)?bias", r".*\.attention\.rotary_emb\.inv_freq")

_PROJECTIONS = ("attention/query", "attention/key", "attention/value")
_KERNELS = tuple(f"{path}/kernel" for path in _PROJECTIONS)
_BIASES = tuple(f"{path}/bias" for path in _PROJECTIONS)
GPT2_BLOCK = (
  *layer_norm("attention_norm", "ln_1"),
  *layer_norm("mlp_norm", "ln_2"),
  # Matrices have their inputs first.
  TensorRule(_KERNELS, "attn.c_attn.weight", "g d h c -> d (g h c)"),
  TensorRule(_BIASES, "attn.c_attn.bias", "g h c -> (g h c)"),
  TensorRule("attention/out/kernel", "attn.c_proj.weight", "h c d -> (h c) d"),
  TensorRule("attention/out/bias", "attn.c_proj.bias", "d -> d"),
  TensorRule("mlp/wi_0/kernel", "mlp.c_fc.weight", "d f -> d f"),
  TensorRule("mlp/wi_0/bias", "mlp.c_fc.bias", "f -> f"),
  TensorRule("mlp/wo/kernel", "mlp.c_proj.weight", "f d -> f d"),
  TensorRule("mlp/wo/bias", "mlp.c_proj.bias", "d -> d"),
)


def _gpt2_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  hf.require(max_position_embeddings=hf["n_positions"])  # another name of it in transformers
  width = hf["n_inner"]
  return {"base_mlp_dim": 4 * hf["n_embd"] if width is None else width}


def _gpt2_to_hf(cfg: ModelConfig) -> JsonObject:
  return {"n_inner": None if cfg.base_mlp_dim == 4 * cfg.base_emb_dim else cfg.base_mlp_dim}


GPT2 = HfFamily(
  "gpt2",
  "GPT2LMHeadModel",
  "gpt2",
  GPT2_BLOCK,
  (Key("trainable_position_size", "n_positions"),),
  decoder_keys=(
    Key("vocab_size", "vocab_size"),
    Key("base_emb_dim", "n_embd"),
    Key("base_num_decoder_layers", "n_layer"),
    Key("base_num_query_heads", "n_head"),
    Key("normalization_layer_epsilon", "layer_norm_epsilon"),
  ),
  defaults={
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
  },
  nullable=("n_inner",),
  required={
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
  },
  activation="",
  is_gated=False,
  activation_key="activation_function",
  extra_from_hf=_gpt2_from_hf,
  extra_to_hf=_gpt2_to_hf,
  rope_from_hf=no_rope,
  rope_to_hf=no_rope,
  heads_from_hf=equal_heads_from_hf("n_head", "n_embd"),
  outer=(
    TensorRule("embed/embedding", "transformer.wte.weight", "v d -> v d"),
    TensorRule("position_embed/embedding", "transformer.wpe.weight", "p d -> p d"),
    *layer_norm("final_norm", "transformer.ln_f"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
  ),
  layer_prefix="transformer.h.{layer}.",
  base_prefix="transformer.",
  ignored=MASKS,
  unread=(
    "n_ctx",  # of older files, as n_positions
    "reorder_and_upcast_attn",  # the order of two products, and their type
    *("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj"),
  ),
  unwritten=("num_key_value_heads", "head_dim", "attention_bias"),
)

NEOX_BLOCK = (
  *layer_norm("attention_norm", "input_layernorm"),
  *layer_norm("mlp_norm", "post_attention_layernorm"),
  # One tensor with the query, key and value of each head.
  TensorRule("attention/query/kernel", "attention.query_key_value.weight", "d h c -> (h c) d"),
  TensorRule("attention/key/kernel", "attention.query_key_value.weight", "d h c -> (h c) d"),
  TensorRule("attention/value/kernel", "attention.query_key_value.weight", "d h c -> (h c) d"),
  TensorRule("attention/query/bias", "attention.query_key_value.bias", "h c -> (h c)"),
  TensorRule("attention/key/bias", "attention.query_key_value.bias", "h c -> (h c)"),
  TensorRule("attention/value/bias", "attention.query_key_value.bias", "h c -> (h c)"),
  TensorRule("attention/out/kernel", "attention.dense.weight", "h c d -> d (h c)"),
  TensorRule("attention/out/bias", "attention.dense.bias", "d -> d"),
  *plain_mlp("mlp", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)


def _neox_rope_from_hf(hf: ConfigJson) -> JsonObject:
  """Return our keys of the rotary embedding, whose base and share have names of their own."""
  name = "rope_scaling"
  rope = dict_of(hf, name)
  parameters = dict_of(hf, "rope_parameters")
  if not rope:
    name = "rope_parameters"
    rope = parameters
  rope.setdefault("rope_theta", hf["rotary_emb_base"])
  rope.setdefault("partial_rotary_factor", hf["rotary_pct"])
  return read_rope(rope, hf, name)


def _neox_rope_to_hf(cfg: ModelConfig) -> JsonObject:
  keys = rope_to_hf(cfg)
  keys["rotary_emb_base"] = keys.pop("rope_theta")
  keys["rotary_pct"] = keys.pop("partial_rotary_factor", 1.0)
  keys["rope_parameters"]["partial_rotary_factor"] = keys["rotary_pct"]
  return keys


def _neox_from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  if hf["use_parallel_residual"]:
    return {}
  return {"decoder_block": "starcoder2"}


def _neox_to_hf(cfg: ModelConfig) -> JsonObject:
  return {"use_parallel_residual": bool(cfg.family.parallel)}


GPT_NEOX = HfFamily(
  "gpt_neox",
  "GPTNeoXForCausalLM",
  "gpt_neox",
  NEOX_BLOCK,
  DENSE_KEYS,
  decoder_keys=(*DECODER_KEYS[:-1], Key("normalization_layer_epsilon", "layer_norm_eps")),
  defaults={
    "vocab_size": 50432,
    "hidden_size": 6144,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "intermediate_size": 24576,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "attention_bias": True,
    "rotary_pct": 0.25,
    "rotary_emb_base": 10_000.0,
  },
  activation="",
  is_gated=False,
  partial_rotary=True,
  variants=("starcoder2",),
  extra_from_hf=_neox_from_hf,
  extra_to_hf=_neox_to_hf,
  rope_from_hf=_neox_rope_from_hf,
  rope_to_hf=_neox_rope_to_hf,
  heads_from_hf=equal_heads_from_hf("num_attention_heads", "hidden_size"),
  row_groups=lambda cfg: dict.fromkeys(
    ("query_key_value.weight", "query_key_value.bias"), cfg.base_num_kv_heads
  ),
  outer=(
    TensorRule("embed/embedding", "gpt_neox.embed_in.weight", "v d -> v d"),
    *layer_norm("final_norm", "gpt_neox.final_layer_norm"),
    TensorRule("unembed/kernel", "embed_out.weight", "d v -> v d"),
  ),
  layer_prefix="gpt_neox.layers.{layer}.",
  base_prefix="gpt_neox.",
  ignored=MASKS,
  unread=("classifier_dropout", "hidden_dropout"),
  unwritten=("num_key_value_heads", "head_dim"),
)
FAMILIES = (GPT2, GPT_NEOX)
