"""Bamba: state-space layers (Mamba-2), and attention in the layers that are listed."""

import math
from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.family import (
  ATTENTION,
  DENSE_KEYS,
  HfFamily,
  Key,
  TensorRule,
  mlp,
)
from maxlite.storage.json_values import Json, JsonObject

_IN = "mamba.in_proj.weight"
_CONV = "mamba.conv1d.weight"
_CONV_BIAS = "mamba.conv1d.bias"
MAMBA = (
  TensorRule("mamba/gate/kernel", _IN, "d h c -> (h c) d"),
  TensorRule("mamba/value/kernel", _IN, "d h c -> (h c) d"),
  TensorRule("mamba/key/kernel", _IN, "d h c -> (h c) d"),
  TensorRule("mamba/query/kernel", _IN, "d h c -> (h c) d"),
  TensorRule("mamba/step/kernel", _IN, "d h -> h d"),
  TensorRule("mamba/value_conv", _CONV, "w h c -> (h c) () w"),
  TensorRule("mamba/key_conv", _CONV, "w h c -> (h c) () w"),
  TensorRule("mamba/query_conv", _CONV, "w h c -> (h c) () w"),
  TensorRule("mamba/value_conv_bias", _CONV_BIAS, "h c -> (h c)"),
  TensorRule("mamba/key_conv_bias", _CONV_BIAS, "h c -> (h c)"),
  TensorRule("mamba/query_conv_bias", _CONV_BIAS, "h c -> (h c)"),
  TensorRule("mamba/decay_rate", "mamba.A_log", "h -> h"),
  TensorRule("mamba/step_bias", "mamba.dt_bias", "h -> h"),
  TensorRule("mamba/skip_scale", "mamba.D", "h -> h"),
  TensorRule("mamba/norm/scale", "mamba.norm.weight", "h c -> (h c)"),
  TensorRule("mamba/out/kernel", "mamba.out_proj.weight", "h c d -> d (h c)"),
)
MAMBA_KEYS = (
  Key("mamba_num_heads", "mamba_n_heads"),
  Key("mamba_num_groups", "mamba_n_groups"),
  Key("mamba_state_dim", "mamba_d_state"),
  Key("mamba_conv_kernel_dim", "mamba_d_conv"),
)
MAMBA_DEFAULTS = {
  "mamba_n_heads": 128,
  "mamba_d_head": "auto",
  "mamba_n_groups": 1,
  "mamba_d_state": 256,
  "mamba_d_conv": 4,
  "mamba_expand": 2,
  "mamba_conv_bias": True,
  "mamba_proj_bias": False,
  "time_step_limit": (0.0, math.inf),
}
MAMBA_REQUIRED = {"mamba_conv_bias": True, "mamba_proj_bias": False}
# The last is that of JSON without infinity, as transformers writes it.
_NO_LIMITS = ((0.0, math.inf), [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
# Of the implementation, of generation, and of losses.
MAMBA_UNREAD = ("mamba_chunk_size", "num_logits_to_keep", "z_loss_coefficient")


def require_no_limits(hf: ConfigJson) -> None:
  """Raise UserError if steps of time are clipped."""
  if hf.get("time_step_limit") not in _NO_LIMITS:
    raise UserError(
      f"config.json has time_step_limit={hf.get('time_step_limit')}, but maxlite supports only "
      "[0.0, Infinity]: choose another checkpoint"
    )


def mamba_from_hf(hf: ConfigJson, num_channels: int | None = None) -> JsonObject:
  """Return our key of the channels of a head of state-space layers.

  Args:
    hf: of a model with keys as Bamba's.
    num_channels: of all heads; None: mamba_expand times the width of the model.

  Raises:
    UserError: all heads do not have the channels that the layer has, or steps are clipped.
  """
  require_no_limits(hf)
  if num_channels is None:
    num_channels = int(hf["mamba_expand"] * hf["hidden_size"])
  num_heads = hf["mamba_n_heads"]
  head_dim = hf["mamba_d_head"]
  if head_dim == "auto":
    head_dim = num_channels // num_heads
  if head_dim * num_heads != num_channels:
    raise UserError(
      f"config.json has mamba_d_head={head_dim} and mamba_n_heads={num_heads}, but "
      f"{num_channels} channels of state-space layers in all: copy it again"
    )
  return {"mamba_head_dim": head_dim}


def mamba_to_hf(cfg: ModelConfig) -> JsonObject:
  """Return keys of config.json that `mamba_from_hf` reads.

  Raises:
    UserError: state-space layers do not have a multiple of the channels of the residual stream.
  """
  mamba = cfg.mamba
  num_channels = mamba.mamba_num_heads * mamba.mamba_head_dim
  if num_channels % cfg.base_emb_dim:
    raise UserError(
      f"mamba_num_heads={mamba.mamba_num_heads} and mamba_head_dim={mamba.mamba_head_dim}: "
      f"config.json needs a multiple of base_emb_dim={cfg.base_emb_dim} channels"
    )
  return {
    "mamba_d_head": mamba.mamba_head_dim,
    "mamba_expand": num_channels // cfg.base_emb_dim,
  }


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return the attending layers, and sizes of state-space layers."""
  listed = hf.get("attn_layer_indices") or ()
  attending = [layer for layer in range(hf["num_hidden_layers"]) if layer in listed]
  return {"attention_layers": tuple(attending)} | mamba_from_hf(hf)


def _to_hf(cfg: ModelConfig) -> JsonObject:
  return {
    "attn_layer_indices": list(cfg.attention_layers),
    "partial_rotary_factor": cfg.rope.partial_rotary_factor,
    **mamba_to_hf(cfg),
  }


BAMBA = HfFamily(
  "bamba",
  "BambaForCausalLM",
  "bamba",
  (
    TensorRule("attention_norm/scale", "input_layernorm.weight", "d -> d"),
    TensorRule("mlp_norm/scale", "pre_ff_layernorm.weight", "d -> d"),
    *ATTENTION,
    *MAMBA,
    *mlp("mlp", "feed_forward"),
  ),
  (*DENSE_KEYS, *MAMBA_KEYS),
  defaults=MAMBA_DEFAULTS
  | {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attn_layer_indices": None,
  },
  nullable=("num_key_value_heads",),
  required=MAMBA_REQUIRED | {"mlp_bias": False},
  partial_rotary=True,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  outer=(
    TensorRule("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
    TensorRule("final_norm/scale", "model.final_layernorm.weight", "d -> d"),
    TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
  ),
  unread=(*MAMBA_UNREAD, "attn_rotary_emb"),
)
FAMILIES = (BAMBA,)
