"""Mistral: Llama with a sliding window."""

import dataclasses

from maxlite.hf.families import llama
from maxlite.hf.shared_mappings import SLIDING_WINDOW

FAMILY = dataclasses.replace(
  llama.FAMILY,
  model_type="mistral",
  architecture="MistralForCausalLM",
  keys=(*llama.FAMILY.keys, SLIDING_WINDOW),
)
