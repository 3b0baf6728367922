"""Granite 4: layers of Bamba with the multipliers of Granite, dense or with experts."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.bamba import (
  MAMBA,
  MAMBA_DEFAULTS,
  MAMBA_KEYS,
  MAMBA_REQUIRED,
  mamba_from_hf,
  mamba_to_hf,
)
from maxlite.hf.families.granite import GRANITEMOE
from maxlite.hf.family import TensorRule
from maxlite.storage.json_values import Json, JsonObject

_SHARED_IN = "shared_mlp.input_linear.weight"
_SHARED_OUT = "shared_mlp.output_linear.weight"
# Names of layers in config.json, of which the first is of the newest files.
_RECURRENT = ("linear_attention", "mamba")
_ATTENDING = ("full_attention", "attention")


def _attention_layers(hf: ConfigJson) -> tuple[int, ...]:
  """Return the layers that attend.

  Raises:
    UserError: a layer is of another kind, or there is not one kind for each layer.
  """
  num_layers = hf["num_hidden_layers"]
  kinds = hf.get("layer_types")
  if kinds is None:
    return ()
  if len(kinds) != num_layers or not {*kinds} <= {*_RECURRENT, *_ATTENDING}:
    raise UserError(
      f"config.json has layer_types={list(kinds)}, but maxlite supports only {_RECURRENT[0]} and "
      f"{_ATTENDING[0]} here, for each of {num_layers} layers: choose another checkpoint"
    )
  return tuple(layer for layer, kind in enumerate(kinds) if kind in _ATTENDING)


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return our keys of all layers, and the family for the kind of MLP and attention.

  Raises:
    UserError: a kind of layer, or the width of the shared MLP next to experts is not supported.
  """
  found = GRANITEMOE.extra_from_hf(hf, keys) | mamba_from_hf(hf)
  found["attention_layers"] = _attention_layers(hf)
  has_rope = hf.get("position_embedding_type") == "rope" and bool(found["attention_layers"])
  width = hf["shared_intermediate_size"]
  num_experts = hf["num_local_experts"]
  if num_experts == 0:
    hf.get("num_experts_per_tok")
    found |= {"base_mlp_dim": width, "num_experts": 1, "num_experts_per_tok": 1}
    return found | {"decoder_block": "bamba" if has_rope else "granite_hybrid"}
  if has_rope:
    raise UserError(
      f"config.json has position_embedding_type='rope' and num_local_experts={num_experts}, but "
      "maxlite supports experts only without it here: choose another checkpoint"
    )
  num_shared, rest = divmod(width, hf["intermediate_size"])
  if rest or num_shared == 0:
    raise UserError(
      f"config.json has shared_intermediate_size={width}, but maxlite supports only multiples of "
      f"intermediate_size={hf['intermediate_size']}: choose another checkpoint"
    )
  return found | {"shared_experts": num_shared}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  kinds = []
  for layer in range(cfg.base_num_decoder_layers):
    kinds.append((_ATTENDING if layer in cfg.attention_layers else _RECURRENT)[0])
  hf = GRANITEMOE.extra_to_hf(cfg) | mamba_to_hf(cfg) | {"layer_types": kinds}
  hf["position_embedding_type"] = "rope" if cfg.family.global_rope else None
  if not cfg.family.is_moe:
    dense = {"num_local_experts": 0, "num_experts_per_tok": 0}
    return hf | dense | {"shared_intermediate_size": cfg.base_mlp_dim}
  width = cfg.moe.shared_experts * cfg.moe.base_moe_mlp_dim
  return hf | {"shared_intermediate_size": width}


GRANITEMOEHYBRID = dataclasses.replace(
  GRANITEMOE,
  model_type="granitemoehybrid",
  architecture="GraniteMoeHybridForCausalLM",
  decoder_block="granite_moe_hybrid",
  variants=("granite_hybrid", "bamba"),
  block=(
    *GRANITEMOE.block,
    *MAMBA,
    TensorRule("moe/shared_experts/wi_0/kernel", _SHARED_IN, "d f -> f d"),
    TensorRule("moe/shared_experts/wi_1/kernel", _SHARED_IN, "d f -> f d"),
    TensorRule("moe/shared_experts/wo/kernel", _SHARED_OUT, "f d -> d f"),
    TensorRule("mlp/wi_0/kernel", _SHARED_IN, "d f -> f d"),
    TensorRule("mlp/wi_1/kernel", _SHARED_IN, "d f -> f d"),
    TensorRule("mlp/wo/kernel", _SHARED_OUT, "f d -> d f"),
  ),
  keys=(*GRANITEMOE.keys, *MAMBA_KEYS),
  defaults={
    **GRANITEMOE.defaults,
    **MAMBA_DEFAULTS,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
    "layer_types": None,
  },
  required=MAMBA_REQUIRED,
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  unread=("mamba_chunk_size",),
)
FAMILIES = (GRANITEMOEHYBRID,)
