"""SmolLM3: layers of Llama, without a rotary embedding in every fourth."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.llama import LLAMA
from maxlite.storage.json_values import Json, JsonObject

INTERVAL = MODELS["smollm3"].global_layer_every


def _has_rope(num_layers: int) -> list[int]:
  """Return what `no_rope_layers` of config.json has: 1 for layers with a rotary embedding."""
  return [int(number % INTERVAL != 0) for number in range(1, num_layers + 1)]


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  num_layers = keys["base_num_decoder_layers"]
  if hf.get("no_rope_layers") is None:
    hf.require(no_rope_layer_interval=INTERVAL)
  else:
    hf.get("no_rope_layer_interval")  # without effect if there is the list
    hf.require(no_rope_layers=_has_rope(num_layers))
  if hf.get("layer_types") is not None:
    hf.require(layer_types=["full_attention"] * num_layers)
  return {}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  num_layers = cfg.base_num_decoder_layers
  return {
    "no_rope_layers": _has_rope(num_layers),
    "no_rope_layer_interval": INTERVAL,
    "layer_types": ["full_attention"] * num_layers,
  }


SMOLLM3 = dataclasses.replace(
  LLAMA,
  model_type="smollm3",
  architecture="SmolLM3ForCausalLM",
  decoder_block="smollm3",
  defaults={
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 2e6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "layer_types": None,
  },
  nullable=("num_key_value_heads",),
  required={"mlp_bias": False, "use_sliding_window": False},
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
  unread=("max_window_layers", "sliding_window"),  # without effect beside use_sliding_window=false
)
FAMILIES = (SMOLLM3,)
