"""Tensor rules and keys that several families share."""

from maxlite.hf.config_keys import Key
from maxlite.hf.family import TensorRule

NORMS = (
  TensorRule("attention_norm/scale", "input_layernorm.weight", "d -> d"),
  TensorRule("mlp_norm/scale", "post_attention_layernorm.weight", "d -> d"),
  TensorRule("moe_norm/scale", "post_attention_layernorm.weight", "d -> d"),
)
ATTENTION = (
  TensorRule("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/key/kernel", "self_attn.k_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/value/kernel", "self_attn.v_proj.weight", "d h c -> (h c) d"),
  TensorRule("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
)
QKV_BIAS = (
  TensorRule("attention/query/bias", "self_attn.q_proj.bias", "h c -> (h c)"),
  TensorRule("attention/key/bias", "self_attn.k_proj.bias", "h c -> (h c)"),
  TensorRule("attention/value/bias", "self_attn.v_proj.bias", "h c -> (h c)"),
)
QK_NORM = (
  TensorRule("attention/query_norm/scale", "self_attn.q_norm.weight", "c -> c"),
  TensorRule("attention/key_norm/scale", "self_attn.k_norm.weight", "c -> c"),
)


def mlp(ours: str, theirs: str) -> tuple[TensorRule, ...]:
  """Return the rules of a gated MLP, given its path and the prefix of its tensors."""
  return (
    TensorRule(f"{ours}/wi_0/kernel", f"{theirs}.gate_proj.weight", "d f -> f d"),
    TensorRule(f"{ours}/wi_1/kernel", f"{theirs}.up_proj.weight", "d f -> f d"),
    TensorRule(f"{ours}/wo/kernel", f"{theirs}.down_proj.weight", "f d -> d f"),
  )


def experts(
  theirs: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> tuple[TensorRule, ...]:
  """Return the rules of a router and of gated experts with separate tensors."""
  return (
    TensorRule("moe/router/kernel", f"{theirs}.gate.weight", "d e -> e d"),
    TensorRule("moe/wi_0", f"{theirs}.experts.{{expert}}.{gate}.weight", "e d f -> f d"),
    TensorRule("moe/wi_1", f"{theirs}.experts.{{expert}}.{up}.weight", "e d f -> f d"),
    TensorRule("moe/wo", f"{theirs}.experts.{{expert}}.{down}.weight", "e f d -> d f"),
  )


# Of the layers of most families; rules for parameters that a model does not have are skipped.
BLOCK = (*NORMS, *ATTENTION, *QKV_BIAS, *QK_NORM, *mlp("mlp", "mlp"))
DENSE_KEYS = (Key("base_mlp_dim", "intermediate_size"),)
MOE_KEYS = (
  Key("base_moe_mlp_dim", "intermediate_size"),
  Key("num_experts_per_tok", "num_experts_per_tok"),
)
SLIDING_WINDOW = Key("sliding_window_size", "sliding_window", 0, writes_null=True)
NORM_TOPK_PROB = Key("norm_topk_prob", "norm_topk_prob", False)
