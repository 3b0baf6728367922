"""Nemotron-H and Nemotron 3: layers that are only a mixer, an MLP or experts."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.schema import DEFAULTS, ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.bamba import MAMBA, require_no_limits
from maxlite.hf.family import (
  ATTENTION,
  DECODER_KEYS,
  DENSE_KEYS,
  NORM_TOPK_PROB,
  HfFamily,
  Key,
  TensorRule,
  no_rope,
)
from maxlite.storage.json_values import Json, JsonObject

# Letters of a pattern, and names of layers in config.json, of which the first is the newest.
_KINDS = {
  "M": ("linear_attention", "mamba"),
  "*": ("full_attention", "attention"),
  "-": ("mlp",),
  "E": ("moe",),
}
_LETTERS = {kind: letter for letter, kinds in _KINDS.items() for kind in kinds}
_DEFAULT_PATTERN = "ME*-"
_MOE_KEYS = (
  Key("num_experts", "n_routed_experts", alias="num_local_experts"),
  Key("num_experts_per_tok", "num_experts_per_tok"),
  Key("base_moe_mlp_dim", "moe_intermediate_size"),
  Key("n_routing_groups", "n_group"),
  Key("topk_routing_group", "topk_group"),
  Key("routed_scaling_factor", "routed_scaling_factor"),
  NORM_TOPK_PROB,
)
# transformers (5.23) raises steps to it, except where it generates token by token, unlike the code
# published with the models: huggingface/transformers#48989. No step is below this.
_NO_LEAST_STEP = 1e-30


def _pattern(hf: ConfigJson) -> str:
  """Return a letter for each layer.

  Raises:
    UserError: a layer is of another kind.
  """
  pattern = hf.get("hybrid_override_pattern")
  kinds = hf.get("layers_block_type")
  if kinds is not None:
    pattern = "".join(_LETTERS.get(kind, "?") for kind in kinds)
  elif pattern is None:
    pattern = _DEFAULT_PATTERN
  if not pattern or not {*pattern} <= {*_KINDS}:
    name = "hybrid_override_pattern" if kinds is None else "layers_block_type"
    names = ", ".join(f"{letter} ({kinds[0]})" for letter, kinds in _KINDS.items())
    raise UserError(
      f"config.json has {name}={hf.get(name)!r}, but maxlite supports only the layers {names}: "
      "choose another checkpoint"
    )
  return pattern


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return the layers, and the family without experts if none has them.

  Raises:
    UserError: the shared expert is not a multiple of the others, or a value is not supported.
  """
  require_no_limits(hf)
  hf.require(attention_head_dim=keys["head_dim"])  # which transformers does not read
  pattern = _pattern(hf)
  found = {"hybrid_override_pattern": pattern, "base_num_decoder_layers": len(pattern)}
  width = hf["moe_shared_expert_intermediate_size"]
  if "E" not in pattern:
    hf.get("moe_latent_size")
    unused = {key.ours: DEFAULTS[key.ours] for key in _MOE_KEYS}
    return found | unused | {"decoder_block": "nemotron_h", "router": DEFAULTS["router"]}
  hf.require(moe_latent_size=None)
  num_shared, rest = divmod(width, keys["base_moe_mlp_dim"])
  if rest or num_shared == 0:
    raise UserError(
      f"config.json has moe_shared_expert_intermediate_size={width}, but maxlite supports only "
      f"multiples of moe_intermediate_size={keys['base_moe_mlp_dim']}: choose another checkpoint"
    )
  return found | {"shared_experts": num_shared}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  kinds = [_KINDS[letter][0] for letter in cfg.hybrid_override_pattern]
  num_channels = cfg.mamba.mamba_num_heads * cfg.mamba.mamba_head_dim
  hf = {
    "layers_block_type": kinds,
    "num_hidden_layers": len(kinds),
    "expand": max(num_channels // cfg.base_emb_dim, 1),
    "time_step_min": _NO_LEAST_STEP,
  }
  if cfg.family.is_moe:
    width = cfg.moe.shared_experts * cfg.moe.base_moe_mlp_dim
    hf["moe_shared_expert_intermediate_size"] = width
  return hf


def _in_mixer(rules: tuple[TensorRule, ...], module: str) -> tuple[TensorRule, ...]:
  """Return rules with `mixer.` in place of the module that their tensors have elsewhere."""
  return tuple(
    dataclasses.replace(rule, theirs=rule.theirs.replace(f"{module}.", "mixer.")) for rule in rules
  )


NEMOTRON_H = HfFamily(
  "nemotron_h",
  "NemotronHForCausalLM",
  "nemotron_h_moe",
  (
    TensorRule("attention_norm/scale", "norm.weight", "d -> d"),
    TensorRule("mlp_norm/scale", "norm.weight", "d -> d"),
    TensorRule("moe_norm/scale", "norm.weight", "d -> d"),
    *_in_mixer(ATTENTION, "self_attn"),
    *_in_mixer(MAMBA, "mamba"),
    TensorRule("mlp/wi_0/kernel", "mixer.up_proj.weight", "d f -> f d"),
    TensorRule("mlp/wo/kernel", "mixer.down_proj.weight", "f d -> d f"),
    TensorRule("moe/router/kernel", "mixer.gate.weight", "d e -> e d"),
    TensorRule("moe/router/bias", "mixer.gate.e_score_correction_bias", "e -> e"),
    TensorRule("moe/wi_0", "mixer.experts.{expert}.up_proj.weight", "e d f -> f d"),
    TensorRule("moe/wo", "mixer.experts.{expert}.down_proj.weight", "e f d -> d f"),
    TensorRule(
      "moe/shared_experts/wi_0/kernel", "mixer.shared_experts.up_proj.weight", "d f -> f d"
    ),
    TensorRule(
      "moe/shared_experts/wo/kernel", "mixer.shared_experts.down_proj.weight", "f d -> d f"
    ),
  ),
  (
    *DENSE_KEYS,
    Key("mamba_num_heads", "mamba_num_heads"),
    Key("mamba_head_dim", "mamba_head_dim"),
    Key("mamba_num_groups", "n_groups"),
    Key("mamba_state_dim", "ssm_state_size"),
    Key("mamba_conv_kernel_dim", "conv_kernel"),
    *_MOE_KEYS,
  ),
  decoder_keys=(
    *(key for key in DECODER_KEYS[:-1] if key.ours != "base_num_decoder_layers"),
    Key("normalization_layer_epsilon", "layer_norm_epsilon"),
  ),
  ours={"router": "sigmoid_group_topk", "routed_bias": True},
  defaults={
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "layers_block_type": None,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "use_conv_bias": True,
    "sliding_window": None,
    "time_step_limit": (0.0, float("inf")),
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
  },
  required={
    "mamba_hidden_act": "silu",
    "mlp_bias": False,
    "sliding_window": None,
    "use_bias": False,
    "use_conv_bias": True,
  },
  activation="",
  is_gated=False,
  activation_key="mlp_hidden_act",
  variants=("nemotron_h",),
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  rope_from_hf=no_rope,
  rope_to_hf=no_rope,
  outer=(
    TensorRule("embed/embedding", "backbone.embeddings.weight", "v d -> v d"),
    TensorRule("final_norm/scale", "backbone.norm_f.weight", "d -> d"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
  ),
  layer_prefix="backbone.layers.{layer}.",
  base_prefix="backbone.",
  ignored=(r"mtp\..*",),
  unread=(
    # Of the implementation and of initial weights.
    *("chunk_size", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "num_logits_to_keep"),
    *("rescale_prenorm_residual", "residual_in_fp32", "use_mamba_kernels"),
    *("time_step_floor", "time_step_max", "time_step_min"),
    # Of other classes, and of layers of multi-token prediction.
    *("expand", "hidden_dropout", "mamba_proj_bias", "n_shared_experts", "num_hidden_layers"),
    *("mtp_layers_block_type", "num_nextn_predict_layers", "rms_norm_eps"),
  ),
)
FAMILIES = (NEMOTRON_H,)
