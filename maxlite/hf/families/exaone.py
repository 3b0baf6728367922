"""EXAONE 4.0: norms after attention and MLP only, and no rotary embedding in global layers."""

from collections.abc import Mapping

from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig
from maxlite.hf.config_json import ConfigJson
from maxlite.hf.families.olmo import BLOCK
from maxlite.hf.family import DENSE_KEYS, SLIDING_WINDOW, HfFamily
from maxlite.hf.layer_types import SLIDING, global_layers_from_hf
from maxlite.storage.json_values import Json, JsonObject


def _from_hf(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  """Return the decoder block: without a window all layers are global, with rotary embeddings."""
  decoder_block = "exaone4_global" if hf["sliding_window"] is None else "exaone4"
  listed = hf.get("layer_types")
  every = MODELS[decoder_block].global_layer_every
  if listed is not None:
    hf.get("sliding_window_pattern")  # without effect if there is the list
    found = global_layers_from_hf(hf, "layer_types", listed, SLIDING, decoder_block)
    return {"decoder_block": decoder_block} | found
  if every:
    hf.require(sliding_window_pattern=every)
  return {"decoder_block": decoder_block}


def _to_hf(cfg: ModelConfig) -> JsonObject:
  interval = cfg.family.global_layer_every or None
  return {"layer_types": SLIDING.of_model(cfg), "sliding_window_pattern": interval}


EXAONE4 = HfFamily(
  "exaone4",
  "Exaone4ForCausalLM",
  "exaone4",
  BLOCK,
  (*DENSE_KEYS, SLIDING_WINDOW),
  defaults={
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 16384,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
  },
  nullable=("sliding_window",),
  variants=("exaone4_global",),
  extra_from_hf=_from_hf,
  extra_to_hf=_to_hf,
)
FAMILIES = (EXAONE4,)
