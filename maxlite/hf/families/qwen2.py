"""Qwen2 and 2.5."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.families import llama
from maxlite.hf.family import Family


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  shared_mappings.require(hf, use_sliding_window=False)
  shared_mappings.require_layer_types(hf, 0)
  return llama.config_from_hf(hf)


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return llama.config_to_hf(cfg) | {"use_sliding_window": False}


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  return (*llama.block(cfg, moe), *shared_mappings.QKV_BIAS)


FAMILY = Family(
  "qwen2",
  "Qwen2ForCausalLM",
  "qwen2",
  config_from_hf,
  config_to_hf,
  block,
  unread=("max_window_layers",),
)
