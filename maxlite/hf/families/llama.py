"""Llama 2 and 3."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.family import Family


def config_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  return shared_mappings.decoder_from_hf(hf) | {"base_mlp_dim": hf["intermediate_size"]}


def config_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  return shared_mappings.decoder_to_hf(cfg) | {
    "intermediate_size": cfg.base_mlp_dim,
    "mlp_bias": False,
  }


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  return (*shared_mappings.NORMS, *shared_mappings.ATTENTION, *shared_mappings.mlp("mlp", "mlp"))


FAMILY = Family("llama", "LlamaForCausalLM", "llama", config_from_hf, config_to_hf, block)
