"""Qwen3, the dense models, with the config.json of Qwen2."""

import dataclasses

from maxlite.hf.families import qwen2

FAMILY = dataclasses.replace(
  qwen2.FAMILY, model_type="qwen3", architecture="Qwen3ForCausalLM", decoder_block="qwen3"
)
