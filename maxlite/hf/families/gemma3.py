"""Gemma 3, the text model."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf.config_keys import require, rope_from_hf, rope_to_hf
from maxlite.hf.families import gemma2

GLOBAL, LOCAL = "full_attention", "sliding_attention"


def _rope_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Newer files have `rope_parameters` by layer type, older ones a base for each type."""
  ropes = hf.get("rope_parameters") or {}
  if GLOBAL in ropes:
    require(ropes[LOCAL], rope_type="default")
    local, rope = ropes[LOCAL]["rope_theta"], {"rope_parameters": ropes[GLOBAL]}
  else:
    local = hf.get("rope_local_base_freq", 10_000.0)
    rope = {"rope_theta": hf.get("rope_theta", 1e6), "rope_scaling": hf.get("rope_scaling")}
  keys = rope_from_hf(rope)
  is_same = keys["rope_type"] == "default" and keys["rope_max_timescale"] == local
  return keys | {"local_rope_max_timescale": 0.0 if is_same else float(local)}


def _rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  keys = rope_to_hf(cfg)
  local = cfg.rope.local_rope_max_timescale or cfg.rope.rope_max_timescale
  ropes = {LOCAL: {"rope_type": "default", "rope_theta": local}, GLOBAL: keys["rope_parameters"]}
  return keys | {"rope_parameters": ropes}


FAMILY = dataclasses.replace(
  gemma2.FAMILY,
  model_type="gemma3_text",
  architecture="Gemma3ForCausalLM",
  decoder_block="gemma3",
  rope_from_hf=_rope_from_hf,
  rope_to_hf=_rope_to_hf,
)
