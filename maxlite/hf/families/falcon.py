"""Falcon: attention and MLP of the same input, and Falcon-RW, whose layers are sequential."""

from collections.abc import Mapping, Sequence

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  DECODER_KEYS,
  HfFamily,
  Key,
  TensorRule,
  layer_norm,
  plain_mlp,
)
from maxlite.hf.hf_rope import rope_from_hf, rope_to_hf
from maxlite.storage.json_values import Json, JsonObject

_QKV = "self_attention.query_key_value"
BLOCK = (
  # One tensor with the queries, the key and the value of each group.
  TensorRule("attention/query/kernel", f"{_QKV}.weight", "d h c -> (h c) d"),
  TensorRule("attention/key/kernel", f"{_QKV}.weight", "d h c -> (h c) d"),
  TensorRule("attention/value/kernel", f"{_QKV}.weight", "d h c -> (h c) d"),
  TensorRule("attention/query/bias", f"{_QKV}.bias", "h c -> (h c)"),
  TensorRule("attention/key/bias", f"{_QKV}.bias", "h c -> (h c)"),
  TensorRule("attention/value/bias", f"{_QKV}.bias", "h c -> (h c)"),
  TensorRule("attention/out/kernel", "self_attention.dense.weight", "h c d -> d (h c)"),
  TensorRule("attention/out/bias", "self_attention.dense.bias", "d -> d"),
  *plain_mlp("mlp", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
)
# By decoder_block: what the flags of config.json are, in the order of _FLAGS.
_FLAGS = ("alibi", "bias", "parallel_attn", "num_ln_in_parallel_attn")
_FLAGS_OF = {
  "falcon": (False, False, True, 1),
  "falcon_own_norms": (False, False, True, 2),
  "falcon_alibi": (True, True, False, 1),
}


def _norms(cfg: ModelConfig) -> Sequence[TensorRule]:
  if cfg.family.parallel == "own_norms":
    return (*layer_norm("attention_norm", "ln_attn"), *layer_norm("mlp_norm", "ln_mlp"))
  # Of these two, layers with one norm have the first.
  return (
    *layer_norm("attention_norm", "input_layernorm"),
    *layer_norm("mlp_norm", "post_attention_layernorm"),
  )


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  width = hf["ffn_hidden_size"]
  num_norms = hf["num_ln_in_parallel_attn"]
  if num_norms is None:
    num_norms = 2 if hf["new_decoder_architecture"] else 1
  flags = (hf["alibi"], hf["bias"], hf["parallel_attn"], num_norms)
  for block, flags_of_block in _FLAGS_OF.items():
    # The others are older than the norms of their own.
    is_known = hf["new_decoder_architecture"] or block != "falcon_own_norms"
    if flags == flags_of_block and is_known:
      return {
        "base_mlp_dim": 4 * hf["hidden_size"] if width is None else width,
        "decoder_block": block,
      }
  found = ", ".join(f"{name}={value}" for name, value in zip(_FLAGS, flags, strict=True))
  raise UserError(
    f"config.json has {found}, a combination that no published Falcon has: choose another "
    "checkpoint"
  )


def _to_hf(cfg: ModelConfig) -> JsonObject:
  width = cfg.base_mlp_dim
  hf: JsonObject = dict(zip(_FLAGS, _FLAGS_OF[cfg.decoder_block], strict=True))
  is_grouped = 1 < cfg.base_num_kv_heads < cfg.base_num_query_heads
  is_new = is_grouped or cfg.family.parallel == "own_norms"
  hf |= {
    "ffn_hidden_size": None if width == 4 * cfg.base_emb_dim else width,
    "new_decoder_architecture": is_new,
    "multi_query": not is_new and cfg.base_num_kv_heads == 1,
    "num_kv_heads": cfg.base_num_kv_heads,
  }
  if not is_new:
    hf["num_ln_in_parallel_attn"] = None
    hf["num_kv_heads"] = None
  return hf


def _heads_from_hf(hf: ConfigJson) -> JsonObject:
  num_heads = hf["num_attention_heads"]
  num_kv_heads = hf["num_kv_heads"]
  if num_kv_heads is None:
    num_kv_heads = num_heads
  is_multi_query = hf["multi_query"]
  if not hf["new_decoder_architecture"]:
    if is_multi_query:
      num_kv_heads = 1
    elif num_kv_heads != num_heads:
      hf.require(num_kv_heads=num_heads)
  return {"base_num_kv_heads": num_kv_heads, "head_dim": hf["hidden_size"] // num_heads}


def _rope_from_hf(hf: ConfigJson) -> JsonObject:
  keys = rope_from_hf(hf)
  return {} if hf["alibi"] else keys


def _rope_to_hf(cfg: ModelConfig) -> JsonObject:
  return rope_to_hf(cfg) if cfg.family.positions == "rope" else {}


FALCON = HfFamily(
  "falcon",
  "FalconForCausalLM",
  "falcon",
  BLOCK,
  decoder_keys=(*DECODER_KEYS[:-1], Key("normalization_layer_epsilon", "layer_norm_epsilon")),
  defaults={
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "num_ln_in_parallel_attn": None,
    "layer_norm_epsilon": 1e-5,
    "num_kv_heads": None,
    "alibi": False,
    "new_decoder_architecture": False,
    "multi_query": True,
    "parallel_attn": True,
    "bias": False,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "ffn_hidden_size": None,
    "activation": "gelu",
    "tie_word_embeddings": True,
  },
  nullable=("ffn_hidden_size", "num_kv_heads", "num_ln_in_parallel_attn"),
  activation="",
  is_gated=False,
  activation_key="activation",
  variants=("falcon_own_norms", "falcon_alibi"),
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  extra_block=_norms,
  rope_from_hf=_rope_from_hf,
  rope_to_hf=_rope_to_hf,
  heads_from_hf=_heads_from_hf,
  row_groups=lambda cfg: dict.fromkeys((f"{_QKV}.weight", f"{_QKV}.bias"), cfg.base_num_kv_heads),
  outer=(
    TensorRule("embed/embedding", "transformer.word_embeddings.weight", "v d -> v d"),
    *layer_norm("final_norm", "transformer.ln_f"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
  ),
  layer_prefix="transformer.h.{layer}.",
  base_prefix="transformer.",
  unread=("apply_residual_connection_post_layernorm", "ff_factor", "hidden_dropout"),
  unwritten=("num_key_value_heads", "head_dim", "attention_bias"),
)
FAMILIES = (FALCON,)
