"""Llama 4: attention in chunks with a rotary embedding, and global layers without one; experts."""

from collections.abc import Mapping

from maxlite.config.moe_plan import moe_plan
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.mixtral import dense_layer_keys, has_experts_of
from maxlite.hf.families.smollm import rotated_from_hf
from maxlite.hf.family import NORMS, HfFamily, Key, TensorRule, mlp
from maxlite.hf.hf_rope import ORIGINAL, read_rope, rope_values
from maxlite.hf.layer_types import ROTATED, LayerKinds, global_layers_from_hf
from maxlite.storage.json_values import Json, JsonObject

CHUNKED = LayerKinds("chunked_attention", "full_attention")
BLOCK = (
  *NORMS,
  # Rotary pairs are adjacent channels.
  TensorRule("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c*) d"),
  TensorRule("attention/key/kernel", "self_attn.k_proj.weight", "d h c -> (h c*) d"),
  TensorRule("attention/value/kernel", "self_attn.v_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
  *mlp("mlp", "feed_forward"),
  *mlp("moe/shared_experts", "feed_forward.shared_expert"),
  TensorRule("moe/router/kernel", "feed_forward.router.weight", "d e -> e d"),
  TensorRule(("moe/wi_0", "moe/wi_1"), "feed_forward.experts.gate_up_proj", "g e d f -> e d (g f)"),
  TensorRule("moe/wo", "feed_forward.experts.down_proj", "e f d -> e f d"),
)


def _rope_from_hf(hf: ConfigJson) -> JsonObject:
  """Return our keys of the rotary embedding, and of the factor of queries of global layers."""
  name, rope = rope_values(hf)
  keys = read_rope(rope, hf, name)
  if keys["rope_type"] not in ("default", "llama3.1", "llama4"):
    raise UserError(
      f"config.json has a rotary embedding of type {keys['rope_type']!r}, but maxlite supports "
      "only default and llama3 here: choose another checkpoint"
    )
  beta = hf["attn_scale"]
  length = hf["floor_scale"]
  if not hf["attn_temperature_tuning"] or not beta:
    return keys | {"query_scaling_beta": 0.0}
  if keys.get(ORIGINAL, length) != length:
    hf.require(floor_scale=keys[ORIGINAL])
  return keys | {"query_scaling_beta": float(beta), ORIGINAL: length}


def _global_layers(hf: ConfigJson) -> JsonObject:
  """Return our key of the layers that attend globally, without a rotary embedding.

  Raises:
    UserError: no layer does, or `layer_types` and `no_rope_layers` do not list the same ones.
  """
  rotated = rotated_from_hf(hf, hf.get("no_rope_layers") or None, "llama4")
  listed = hf.get("layer_types")
  if listed is not None:
    attending = global_layers_from_hf(hf, "layer_types", listed, CHUNKED, "llama4")
    if attending != rotated:
      raise UserError(
        f"config.json has layer_types={listed}, of which others attend globally than those without "
        "a rotary embedding by no_rope_layers: choose another checkpoint"
      )
  return rotated


def _has_experts(hf: ConfigJson) -> list[bool]:
  """Return for every layer whether it has experts.

  Raises:
    UserError: no layer has.
  """
  num_layers = hf["num_hidden_layers"]
  step = hf["interleave_moe_layer_step"]
  listed = hf.get("moe_layers")
  if listed is None:
    listed = range(step - 1, num_layers, step)
  has_experts = [layer in listed for layer in range(num_layers)]
  if not any(has_experts):
    raise UserError(
      f"config.json has interleave_moe_layer_step={step} and moe_layers={list(listed)}, with which "
      "no layer has experts: choose another checkpoint"
    )
  return has_experts


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  decoder_block = "llama4" if hf["use_qk_norm"] else "llama4_maverick"
  plan = dense_layer_keys(_has_experts(hf))
  return {"decoder_block": decoder_block} | _global_layers(hf) | plan


def _to_hf(cfg: ModelConfig) -> JsonObject:
  has_experts = has_experts_of(cfg)
  plan = moe_plan(has_experts)
  beta = cfg.rope.query_scaling_beta
  return {
    "use_qk_norm": bool(cfg.family.attention.qk_norm),
    "no_rope_layers": ROTATED.of_model(cfg),
    "layer_types": CHUNKED.of_model(cfg),
    "moe_layers": [layer for layer, has in enumerate(has_experts) if has],
    "interleave_moe_layer_step": plan[1] if plan else 1,
    "attn_temperature_tuning": beta > 0,
    "attn_scale": beta or 0.1,
    "floor_scale": cfg.rope.original_max_position_embeddings,
  }


LLAMA4 = HfFamily(
  "llama4_text",
  "Llama4ForCausalLM",
  "llama4",
  BLOCK,
  (
    Key("base_moe_mlp_dim", "intermediate_size"),
    Key("base_mlp_dim", "intermediate_size_mlp"),
    Key("num_experts", "num_local_experts"),
    Key("sliding_window_size", "attention_chunk_size"),
  ),
  variants=("llama4_maverick",),
  ours={
    "num_experts_per_tok": 1,
    "router": "topk_sigmoid",
    "norm_topk_prob": False,
    "shared_experts": 1,
  },
  defaults={
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "num_experts_per_tok": 1,
    "num_local_experts": 16,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "layer_types": None,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
  },
  required={"num_experts_per_tok": 1},
  rope_from_hf=_rope_from_hf,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  unread=("for_llm_compressor",),
)
FAMILIES = (LLAMA4,)
