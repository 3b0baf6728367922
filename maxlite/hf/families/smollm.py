"""SmolLM3: layers of Llama, without a rotary embedding in every fourth or in listed ones."""

import dataclasses
from collections.abc import Mapping

from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.llama import LLAMA
from maxlite.hf.layer_types import ROTATED, global_layers_from_hf
from maxlite.storage.json_values import Json, JsonObject


def rotated_from_hf(hf: ConfigJson, listed: Json, decoder_block: str) -> JsonObject:
  """Return our key of the layers without a rotary embedding.

  Args:
    listed: `no_rope_layers`, which has 0 for them and 1 for the others; null: every n-th is one.

  Raises:
    UserError: no layer is without, or the list is not one of 0 and 1 for each layer.
  """
  if listed is not None:
    hf.get("no_rope_layer_interval")  # without effect if there is the list
    return global_layers_from_hf(hf, "no_rope_layers", listed, ROTATED, decoder_block)
  interval = hf["no_rope_layer_interval"]
  num_layers = hf["num_hidden_layers"]
  every = MODELS[decoder_block].global_layer_every
  if interval != every and not 1 <= interval <= num_layers:
    hf.require(no_rope_layer_interval=every)
  listed = ROTATED.of_interval(num_layers, interval)
  return global_layers_from_hf(hf, "no_rope_layers", listed, ROTATED, decoder_block)


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  if hf.get("layer_types") is not None:
    hf.require(layer_types=["full_attention"] * keys["base_num_decoder_layers"])
  return rotated_from_hf(hf, hf.get("no_rope_layers"), "smollm3")


def _to_hf(cfg: ModelConfig) -> JsonObject:
  num_layers = cfg.base_num_decoder_layers
  return {
    "no_rope_layers": ROTATED.of_model(cfg),
    "no_rope_layer_interval": cfg.family.global_layer_every,
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
