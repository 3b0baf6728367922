"""Mistral: Llama with a sliding window."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf.families import llama
from maxlite.hf.family import Family


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  return llama.config_from_hf(hf) | {"sliding_window_size": hf.get("sliding_window") or 0}


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return llama.config_to_hf(cfg) | {"sliding_window": cfg.sliding_window_size or None}


FAMILY = Family("mistral", "MistralForCausalLM", "llama", config_from_hf, config_to_hf, llama.block)
