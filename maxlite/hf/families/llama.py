"""Llama 2 and 3, and dense models with its layers: Mistral, Qwen2, Qwen2.5 and Qwen3."""

import dataclasses

from maxlite.hf.family import BLOCK, DENSE_KEYS, SLIDING_WINDOW, HfFamily

LLAMA = HfFamily(
  "llama", "LlamaForCausalLM", "llama", BLOCK, DENSE_KEYS, required={"mlp_bias": False}
)
MISTRAL = dataclasses.replace(
  LLAMA, model_type="mistral", architecture="MistralForCausalLM", keys=(*DENSE_KEYS, SLIDING_WINDOW)
)
QWEN2 = dataclasses.replace(
  LLAMA,
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  decoder_block="qwen2",
  required={"mlp_bias": False, "use_sliding_window": False},
  checks_layer_types=True,
  unread=("max_window_layers",),
)
QWEN3 = dataclasses.replace(
  QWEN2, model_type="qwen3", architecture="Qwen3ForCausalLM", decoder_block="qwen3"
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3)
