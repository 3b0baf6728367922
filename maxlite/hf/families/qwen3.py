"""Qwen3 without experts: its config.json says what Qwen2's does."""

from maxlite.config.schema import ModelConfig
from maxlite.hf import shared_mappings
from maxlite.hf.families import llama, qwen2
from maxlite.hf.family import Family


def block(cfg: ModelConfig, moe: bool) -> shared_mappings.Rows:
  return (*llama.block(cfg, moe), *shared_mappings.QK_NORM)


FAMILY = Family(
  "qwen3",
  "Qwen3ForCausalLM",
  "qwen3",
  qwen2.config_from_hf,
  qwen2.config_to_hf,
  block,
  unread=qwen2.FAMILY.unread,
)
