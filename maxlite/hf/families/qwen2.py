"""Qwen2 and 2.5."""

import dataclasses

from maxlite.hf.families import llama

FAMILY = dataclasses.replace(
  llama.FAMILY,
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  decoder_block="qwen2",
  required={"mlp_bias": False, "use_sliding_window": False},
  checks_layer_types=True,
  unread=("max_window_layers",),
)
