"""nanochat: norms without parameters, squared ReLU, and a soft cap of the logits."""

from maxlite.hf.family import (
  ATTENTION,
  DENSE_KEYS,
  OUTER,
  HfFamily,
  Key,
  TensorRule,
)

NANOCHAT = HfFamily(
  "nanochat",
  "NanoChatForCausalLM",
  "nanochat",
  (
    *ATTENTION,
    TensorRule("mlp/wi_0/kernel", "mlp.fc1.weight", "d f -> f d"),
    TensorRule("mlp/wo/kernel", "mlp.fc2.weight", "f d -> d f"),
  ),
  (
    *DENSE_KEYS,
    Key("final_logits_soft_cap", "final_logit_softcapping", null=0.0, off=0.0),
  ),
  defaults={
    "vocab_size": 50304,
    "hidden_size": 768,
    "intermediate_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": None,
    "hidden_act": "relu2",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "final_logit_softcapping": 15.0,
  },
  nullable=("num_key_value_heads", "final_logit_softcapping"),
  activation="",
  is_gated=False,
  outer=OUTER,
)
FAMILIES = (NANOCHAT,)
