"""Falcon-H1: attention and a state-space layer of one norm, with factors of their projections."""

from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.bamba import (
  MAMBA,
  MAMBA_DEFAULTS,
  MAMBA_KEYS,
  MAMBA_REQUIRED,
  MAMBA_UNREAD,
  mamba_from_hf,
)
from maxlite.hf.family import ATTENTION, DENSE_KEYS, HfFamily, Key, TensorRule, mlp
from maxlite.storage.json_values import Json, JsonObject

# Multipliers with the same name and value in maxlite.
_FACTORS = (
  *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"),
  *("ssm_in_multiplier", "ssm_out_multiplier"),
)
# Lists of multipliers, of which null means that all are 1.
_LISTS = {"ssm_multipliers": 5, "mlp_multipliers": 2}
_POSITIVE = ("lm_head_multiplier", "embedding_multiplier")


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return our keys of state-space layers and of multipliers.

  Raises:
    UserError: all heads do not have the channels that the layer has, a list does not have a number
      for each projection, or a multiplier is not positive.
  """
  found = mamba_from_hf(hf, hf.get("mamba_d_ssm")) | {"mamba_norm": _norm(hf)}
  for name in _POSITIVE:
    if hf[name] <= 0:
      raise UserError(
        f"config.json has {name}={hf[name]}, but maxlite supports only positive numbers: choose "
        "another checkpoint"
      )
  found["logits_scaling"] = 1 / hf["lm_head_multiplier"]
  for name, num in _LISTS.items():
    values = hf.get(name)
    if values is None:
      values = [1.0] * num
    if len(values) < num:
      raise UserError(f"config.json has {name}={values}, but {num} numbers are needed")
    found[name] = tuple(values[:num])
  return found


def _norm(hf: ConfigJson) -> str:
  is_before = hf.get("mamba_norm_before_gate")
  if not hf.get("mamba_rms_norm"):
    return "none"
  return "before_gate" if is_before else "after_gate"


def _to_hf(cfg: ModelConfig) -> JsonObject:
  mamba = cfg.mamba
  factors = cfg.multipliers
  return {
    "mamba_d_head": mamba.mamba_head_dim,
    "mamba_d_ssm": mamba.mamba_num_heads * mamba.mamba_head_dim,
    "mamba_rms_norm": mamba.mamba_norm != "none",
    "mamba_norm_before_gate": mamba.mamba_norm == "before_gate",
    "lm_head_multiplier": 1 / cfg.logits_scaling,
    "ssm_multipliers": list(factors.ssm_multipliers),
    "mlp_multipliers": list(factors.mlp_multipliers),
  }


FALCON_H1 = HfFamily(
  "falcon_h1",
  "FalconH1ForCausalLM",
  "falcon_h1",
  (
    TensorRule("attention_norm/scale", "input_layernorm.weight", "d -> d"),
    TensorRule("mlp_norm/scale", "pre_ff_layernorm.weight", "d -> d"),
    *ATTENTION,
    *MAMBA,
    *mlp("mlp", "feed_forward"),
  ),
  (
    *DENSE_KEYS,
    *MAMBA_KEYS,
    *(Key(name, name) for name in _FACTORS),
    Key("embedding_multiplier", "embedding_multiplier"),
  ),
  defaults={
    **MAMBA_DEFAULTS,
    **dict.fromkeys((*_FACTORS, *_POSITIVE), 1.0),
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "mamba_d_ssm": 1024,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
    "ssm_multipliers": None,
    "mlp_multipliers": None,
  },
  nullable=("num_key_value_heads",),
  required=MAMBA_REQUIRED | {"mlp_bias": False, "projectors_bias": False},
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  outer=(
    TensorRule("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
    TensorRule("final_norm/scale", "model.final_layernorm.weight", "d -> d"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
  ),
  # Of published files, not read by transformers; mamba_expand only without mamba_d_ssm.
  unread=(*MAMBA_UNREAD, "attn_layer_indices", "mamba_use_mlp", "mamba_expand"),
)
FAMILIES = (FALCON_H1,)
