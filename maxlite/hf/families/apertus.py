"""Apertus: layers of Qwen3 with xIELU, whose curvatures are trained, in place of a gate."""

from maxlite.hf.family import ATTENTION, DENSE_KEYS, QK_NORM, HfFamily, TensorRule
from maxlite.layers.xielu import BOUND, SLOPE

APERTUS = HfFamily(
  "apertus",
  "ApertusForCausalLM",
  "qwen3",
  (
    TensorRule("attention_norm/scale", "attention_layernorm.weight", "d -> d"),
    TensorRule("mlp_norm/scale", "feedforward_layernorm.weight", "d -> d"),
    *ATTENTION,
    *QK_NORM,
    TensorRule("mlp/wi_0/kernel", "mlp.up_proj.weight", "d f -> f d"),
    TensorRule("mlp/wo/kernel", "mlp.down_proj.weight", "f d -> d f"),
    TensorRule("mlp/xielu/positive_scale", "mlp.act_fn.alpha_p", "u -> u"),
    TensorRule("mlp/xielu/negative_scale", "mlp.act_fn.alpha_n", "u -> u"),
  ),
  DENSE_KEYS,
  defaults={
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 12_000_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_parameters": {
      "rope_type": "llama3",
      "rope_theta": 12_000_000.0,
      "factor": 8.0,
      "original_max_position_embeddings": 8192,
      "low_freq_factor": 1.0,
      "high_freq_factor": 4.0,
    },
  },
  nullable=("num_key_value_heads",),
  activation="xielu",
  is_gated=False,
  constants={"mlp.act_fn.beta": SLOPE, "mlp.act_fn.eps": BOUND},
)
FAMILIES = (APERTUS,)
