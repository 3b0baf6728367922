"""Gemma 3, the text model."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.families import gemma2
from maxlite.hf.family import Family

GLOBAL, LOCAL = "full_attention", "sliding_attention"


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Newer files have `rope_parameters` by type of layer, older ones a base for either type."""
  ropes = hf.get("rope_parameters") or {}
  if GLOBAL in ropes:
    shared_mappings.require(ropes[LOCAL], rope_type="default")
    local, whole = ropes[LOCAL]["rope_theta"], {"rope_parameters": ropes[GLOBAL]}
  else:
    local = hf.get("rope_local_base_freq", 10_000.0)
    whole = {"rope_theta": hf.get("rope_theta", 1e6), "rope_scaling": hf.get("rope_scaling")}
  keys = gemma2.shared_from_hf(hf, 6, whole)
  alike = keys["rope_type"] == "default" and keys["rope_max_timescale"] == local
  return keys | {"local_rope_max_timescale": 0.0 if alike else float(local)}


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  keys = gemma2.shared_to_hf(cfg, 6)
  local = cfg.rope.local_rope_max_timescale or cfg.rope.rope_max_timescale
  ropes = {LOCAL: {"rope_type": "default", "rope_theta": local}, GLOBAL: keys["rope_parameters"]}
  return keys | {"rope_parameters": ropes}


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  return (*gemma2.block(cfg, moe), *shared_mappings.QK_NORM)


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", "gemma3", config_from_hf, config_to_hf, block)
