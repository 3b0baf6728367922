"""Llama 2 and 3."""

from maxlite.hf.family import HfFamily
from maxlite.hf.shared_mappings import DENSE_BLOCK, DENSE_KEYS

FAMILY = HfFamily(
  "llama",
  "LlamaForCausalLM",
  "llama",
  DENSE_BLOCK,
  DENSE_KEYS,
  required={"mlp_bias": False},
)
