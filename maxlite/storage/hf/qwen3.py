"""Qwen3 without experts: its config.json says what Qwen2's does."""

from maxlite.config.schema import ModelConfig
from maxlite.storage.hf import llama, parts, qwen2
from maxlite.storage.hf.family import Family


def block(cfg: ModelConfig, moe: bool) -> parts.Rows:
  return (*llama.block(cfg, moe), *parts.QK_NORM)


FAMILY = Family(
  "qwen3",
  "Qwen3ForCausalLM",
  "qwen3",
  qwen2.config_from_hf,
  qwen2.config_to_hf,
  block,
  unread=qwen2.FAMILY.unread,
)
