"""The text models of Gemma 4: cycles of local layers and a global one, dense and MoE."""

from collections.abc import Mapping, Sequence

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.gemma import FINAL_SOFT_CAP, POST_NORMS
from maxlite.hf.family import (
  ATTENTION,
  DENSE_KEYS,
  OUTER,
  QK_NORM,
  SLIDING_WINDOW,
  HfFamily,
  Key,
  TensorRule,
  fused_experts,
  mlp,
)
from maxlite.hf.hf_rope import GLOBAL, LOCAL, dict_of, require_local_timescale
from maxlite.storage.json_values import Json, JsonObject

PER_LAYER_EMBED = (
  TensorRule(
    "per_layer_embed/embedding", "model.embed_tokens_per_layer.weight", "v n p -> v (n p)"
  ),
  TensorRule(
    "per_layer_embed/projection/kernel",
    "model.per_layer_model_projection.weight",
    "d n p -> (n p) d",
  ),
  TensorRule(
    "per_layer_embed/projection_norm/scale", "model.per_layer_projection_norm.weight", "p -> p"
  ),
)
PER_LAYER_INPUT = (
  TensorRule("per_layer/gate/kernel", "per_layer_input_gate.weight", "d p -> p d"),
  TensorRule("per_layer/projection/kernel", "per_layer_projection.weight", "p d -> d p"),
  TensorRule("per_layer/norm/scale", "post_per_layer_input_norm.weight", "d -> d"),
)
MIXTURE = (
  TensorRule("mlp_branch_norm/scale", "post_feedforward_layernorm_1.weight", "d -> d"),
  TensorRule("moe_norm/scale", "pre_feedforward_layernorm_2.weight", "d -> d"),
  TensorRule("moe_branch_norm/scale", "post_feedforward_layernorm_2.weight", "d -> d"),
  TensorRule("moe/router/kernel", "router.proj.weight", "d e -> e d"),
  TensorRule("moe/router/norm/scale", "router.scale", "d -> d"),
  TensorRule("moe/router/expert_scale", "router.per_expert_scale", "e -> e"),
  *fused_experts("experts"),
)
_DEFAULT_INTERVAL = 6  # of transformers, where config.json has no layer_types
_DEFAULT_GLOBAL_HEAD_DIM = 512  # of transformers; not a field of its config class
_DEFAULT_ROPES = {
  LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
  GLOBAL: {
    "rope_type": "proportional",
    "partial_rotary_factor": 0.25,
    "rope_theta": 1_000_000.0,
  },
}
# The norm that transformers gives values has no weight.
_UNUSED_KEYS_VALUES = ("k_proj", "v_proj", "k_norm")


def _layer_types(num_layers: int, interval: int) -> list[str]:
  kinds = []
  for number in range(1, num_layers + 1):
    kinds.append(LOCAL if number % interval else GLOBAL)
  return kinds


def _interval(hf: ConfigJson) -> int:
  """Return the number of layers per cycle.

  Raises:
    UserError: the layers do not repeat in cycles of local layers and a global one.
  """
  num_layers = hf["num_hidden_layers"]
  kinds = hf.get("layer_types")
  if kinds is None:
    kinds = _layer_types(num_layers, _DEFAULT_INTERVAL)
  kinds = [*kinds[:-1], GLOBAL]  # transformers replaces the last one
  interval = kinds.index(GLOBAL) + 1
  if kinds != _layer_types(num_layers, interval) or num_layers % interval or interval == 1:
    raise UserError(
      f"config.json has layer_types={kinds}, but maxlite supports only equal cycles of local "
      "layers and a global one here: choose another checkpoint"
    )
  return interval


def _global_sizes(hf: ConfigJson, interval: int) -> tuple[int, int]:
  """Return (channels, key/value heads) of the heads of global layers.

  Newer files have `per_layer_config` by the number of the layer, published ones `global_head_dim`.

  Raises:
    UserError: global layers differ, or local ones from the other keys.
  """
  by_layer = hf.get("per_layer_config")
  head_dim: Json = _DEFAULT_GLOBAL_HEAD_DIM
  if "global_head_dim" in hf:
    head_dim = hf["global_head_dim"]
  num_kv_heads: Json = hf.get("num_global_key_value_heads")
  if num_kv_heads is None or not hf["attention_k_eq_v"]:
    num_kv_heads = hf["num_key_value_heads"]
  if by_layer is None:
    return head_dim, num_kv_heads
  # transformers does not read the other keys beside per_layer_config. It pads the numbers of layers
  # with zeros to equal length.
  by_number = {}
  for number, sizes_of_layer in by_layer.items():
    by_number[int(number) if number.isdecimal() else number] = sizes_of_layer
  of_global: JsonObject = dict(by_number.get(interval - 1, {}))
  expected = {}
  if of_global:
    numbers = range(interval - 1, hf["num_hidden_layers"], interval)
    expected = dict.fromkeys(numbers, of_global)
  is_ambiguous = len(by_number) < len(by_layer)
  others = set(of_global) - {"head_dim", "num_key_value_heads"}
  if by_number != expected or is_ambiguous or others:
    raise UserError(
      f"config.json has per_layer_config={by_layer}, but maxlite supports only one head_dim and "
      "num_key_value_heads for all global layers: choose another checkpoint"
    )
  sizes: JsonObject = {"head_dim": hf["head_dim"], "num_key_value_heads": hf["num_key_value_heads"]}
  sizes |= of_global
  return sizes["head_dim"], sizes["num_key_value_heads"]


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return the keys of cycles, of layers without keys and values, and of the mixture."""
  if hf.get("use_bidirectional_attention") == "all":  # "vision" concerns images only
    hf.require(use_bidirectional_attention=None)
  interval = _interval(hf)
  head_dim, num_kv_heads = _global_sizes(hf, interval)
  num_shared = hf["num_kv_shared_layers"]
  if num_shared % interval or num_shared >= hf["num_hidden_layers"]:
    raise UserError(
      f"config.json has num_kv_shared_layers={num_shared}, but maxlite supports only whole cycles "
      f"of {interval} layers: choose another checkpoint"
    )
  if hf["hidden_size_per_layer_input"]:
    hf.require(vocab_size_per_layer_input=hf["vocab_size"])
  else:
    hf.get("vocab_size_per_layer_input")
  more: JsonObject = {
    "inhomogeneous_layer_cycle_interval": interval,
    "global_head_dim": 0 if head_dim == keys["head_dim"] else head_dim,
    "global_num_kv_heads": 0 if num_kv_heads == keys["base_num_kv_heads"] else num_kv_heads,
  }
  names = ("num_experts", "top_k_experts", "moe_intermediate_size")
  if not hf["enable_moe_block"]:
    for name in names:
      hf.get(name)
    return more
  num_experts, num_chosen, width = (hf[name] for name in names)
  return more | {
    "decoder_block": "gemma4_moe",
    "router": "topk_softmax",
    "norm_topk_prob": True,
    "num_experts": num_experts,
    "num_experts_per_tok": num_chosen,
    "base_moe_mlp_dim": width,
  }


def _to_hf(cfg: ModelConfig) -> JsonObject:
  hf: JsonObject = {
    "layer_types": _layer_types(
      cfg.base_num_decoder_layers, cfg.inhomogeneous_layer_cycle_interval
    ),
    "global_head_dim": cfg.global_head_dim,
    "num_global_key_value_heads": cfg.global_num_kv_heads,
    "vocab_size_per_layer_input": cfg.vocab_size,
    "enable_moe_block": cfg.family.is_moe,
  }
  if cfg.family.is_moe:
    hf |= {
      "num_experts": cfg.moe.num_experts,
      "top_k_experts": cfg.moe.num_experts_per_tok,
      "moe_intermediate_size": cfg.moe.base_moe_mlp_dim,
    }
  return hf


def _rope_from_hf(hf: ConfigJson) -> JsonObject:
  """Return the keys of the rotary embeddings of global and of local layers."""
  ropes = ConfigJson(
    dict_of(hf, "rope_parameters") or _DEFAULT_ROPES, {}, prefix="rope_parameters."
  )
  parts = {}
  for kind in (GLOBAL, LOCAL):
    prefix = f"rope_parameters.{kind}."
    defaults = {"partial_rotary_factor": 1.0, "factor": 1.0}
    part = ConfigJson(dict_of(ropes, kind), defaults, prefix=prefix)
    part.require(factor=1.0)
    if kind == LOCAL or part["rope_type"] != "proportional":
      part.require(rope_type="default", partial_rotary_factor=1.0)
    parts[kind] = {
      "type": part["rope_type"],
      "timescale": float(part["rope_theta"]),
      "share": float(part["partial_rotary_factor"]),
    }
    part.require_no_others(())
  ropes.require_no_others(())
  local_timescale = parts[LOCAL]["timescale"]
  require_local_timescale(local_timescale)
  if local_timescale == parts[GLOBAL]["timescale"]:
    local_timescale = 0.0
  return {
    "rope_type": parts[GLOBAL]["type"],
    "rope_max_timescale": parts[GLOBAL]["timescale"],
    "partial_rotary_factor": parts[GLOBAL]["share"],
    "local_rope_max_timescale": local_timescale,
  }


def _rope_to_hf(cfg: ModelConfig) -> JsonObject:
  rope = cfg.rope
  of_global: JsonObject = {
    "rope_type": rope.rope_type,
    "rope_theta": rope.rope_max_timescale,
  }
  if rope.partial_rotary_factor != 1:
    of_global["partial_rotary_factor"] = rope.partial_rotary_factor
  local_timescale = rope.local_rope_max_timescale or rope.rope_max_timescale
  of_local = {"rope_type": "default", "rope_theta": local_timescale}
  return {"rope_parameters": {LOCAL: of_local, GLOBAL: of_global}}


def _unused_tensors(cfg: ModelConfig) -> Sequence[str]:
  """Return regexes of the projections of layers that attend to the keys of others."""
  first = cfg.base_num_decoder_layers - cfg.cycle.num_kv_shared_layers
  names = "|".join(_UNUSED_KEYS_VALUES)
  regexes = []
  for layer in range(first, cfg.base_num_decoder_layers):
    regexes.append(rf"model\.(language_model\.)?layers\.{layer}\.self_attn\.({names})\.weight")
  return regexes


GEMMA4 = HfFamily(
  "gemma4_text",
  "Gemma4ForCausalLM",
  "gemma4",
  (
    *POST_NORMS,
    *ATTENTION,
    *QK_NORM,
    *mlp("mlp", "mlp"),
    *MIXTURE,
    *PER_LAYER_INPUT,
    TensorRule("layer_scale", "layer_scalar", "u -> u"),
  ),
  (
    *DENSE_KEYS,
    SLIDING_WINDOW,
    FINAL_SOFT_CAP,
    Key("share_kv_projections", "attention_k_eq_v"),
    Key("num_kv_shared_layers", "num_kv_shared_layers"),
    Key("use_double_wide_mlp", "use_double_wide_mlp"),
    Key("hidden_size_per_layer_input", "hidden_size_per_layer_input"),
  ),
  ours={"query_pre_attn_scalar": 1.0},
  variants=("gemma4_moe",),
  outer=(*OUTER, *PER_LAYER_EMBED),
  defaults={
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": None,
    "attention_bias": False,
    "sliding_window": 512,
    "layer_types": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": None,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "enable_moe_block": False,
    "use_double_wide_mlp": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
  },
  nullable=("final_logit_softcapping",),
  activation="gelu_pytorch_tanh",
  activation_key="hidden_activation",
  partial_rotary=True,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  rope_from_hf=_rope_from_hf,
  rope_to_hf=_rope_to_hf,
  extra_ignored=_unused_tensors,
)
FAMILIES = (GEMMA4,)
