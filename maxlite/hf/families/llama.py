"""Llama 2 and 3, and dense models with its layers: Mistral, Qwen2, Qwen2.5, Qwen3, Seed-OSS."""

import dataclasses

from maxlite.hf.family import BLOCK, DENSE_KEYS, SLIDING_WINDOW, HfFamily

LLAMA = HfFamily(
  "llama",
  "LlamaForCausalLM",
  "llama",
  BLOCK,
  DENSE_KEYS,
  defaults={
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
  },
  nullable=("num_key_value_heads", "head_dim"),
  required={"mlp_bias": False},
)
MISTRAL = dataclasses.replace(
  LLAMA,
  model_type="mistral",
  architecture="MistralForCausalLM",
  keys=(*DENSE_KEYS, SLIDING_WINDOW),
  defaults={
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
  },
  nullable=("head_dim", "sliding_window"),
)
_QWEN2_DEFAULTS = {
  "vocab_size": 151936,
  "hidden_size": 4096,
  "intermediate_size": 22016,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": 32,
  "hidden_act": "silu",
  "max_position_embeddings": 32768,
  "rms_norm_eps": 1e-6,
  "rope_theta": 10_000.0,
  "tie_word_embeddings": False,
  "use_sliding_window": False,
  "layer_types": None,
}
QWEN2 = dataclasses.replace(
  LLAMA,
  model_type="qwen2",
  architecture="Qwen2ForCausalLM",
  decoder_block="qwen2",
  defaults=_QWEN2_DEFAULTS,
  nullable=("num_key_value_heads",),
  required={"mlp_bias": False, "use_sliding_window": False},
  checks_layer_types=True,
  unread=("max_window_layers", "sliding_window"),  # of use_sliding_window
)
QWEN3 = dataclasses.replace(
  QWEN2,
  model_type="qwen3",
  architecture="Qwen3ForCausalLM",
  decoder_block="qwen3",
  defaults=_QWEN2_DEFAULTS | {"head_dim": 128, "attention_bias": False},
)
SEED_OSS = dataclasses.replace(
  LLAMA,
  model_type="seed_oss",
  architecture="SeedOssForCausalLM",
  decoder_block="qwen2",
  defaults={
    "vocab_size": 155136,
    "hidden_size": 4096,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 524288,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_out_bias": False,
    "mlp_bias": False,
  },
  required={"mlp_bias": False, "attention_out_bias": False},
  attention_bias=True,
  unread=("residual_dropout",),
)
FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, SEED_OSS)
