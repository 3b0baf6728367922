"""Rows and config keys that several families share."""

from collections.abc import Mapping, Sequence
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.hf.family import Row

Rows = Sequence[Row]
NORMS = (
  Row("attention_norm/scale", "input_layernorm.weight", "d -> d"),
  Row("mlp_norm/scale", "post_attention_layernorm.weight", "d -> d"),
  Row("moe_norm/scale", "post_attention_layernorm.weight", "d -> d"),
)
ATTENTION = (
  Row("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c) d"),
  Row("attention/key/kernel", "self_attn.k_proj.weight", "d h c -> (h c) d"),
  Row("attention/value/kernel", "self_attn.v_proj.weight", "d h c -> (h c) d"),
  Row("attention/out/kernel", "self_attn.o_proj.weight", "h c d -> d (h c)"),
)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
QKV_BIAS = (
  Row("attention/query/bias", "self_attn.q_proj.bias", "h c -> (h c)"),
  Row("attention/key/bias", "self_attn.k_proj.bias", "h c -> (h c)"),
  Row("attention/value/bias", "self_attn.v_proj.bias", "h c -> (h c)"),
)
QK_NORM = (
  Row("attention/query_norm/scale", "self_attn.q_norm.weight", "c -> c"),
  Row("attention/key_norm/scale", "self_attn.k_norm.weight", "c -> c"),
)


def mlp(ours: str, theirs: str) -> tuple[Row, ...]:
  """Rows of a gated MLP: `ours` its path, `theirs` its name."""
  return (
    Row(f"{ours}/wi_0/kernel", f"{theirs}.gate_proj.weight", "d f -> f d"),
    Row(f"{ours}/wi_1/kernel", f"{theirs}.up_proj.weight", "d f -> f d"),
    Row(f"{ours}/wo/kernel", f"{theirs}.down_proj.weight", "f d -> d f"),
  )


def experts(theirs: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
  """Rows of gated experts that have tensors of their own, and of their router."""
  return (
    Row("moe/router/kernel", f"{theirs}.gate.weight", "d e -> e d"),
    Row("moe/wi_0", f"{theirs}.experts.{{expert}}.{gate}.weight", "e d f -> f d"),
    Row("moe/wi_1", f"{theirs}.experts.{{expert}}.{up}.weight", "e d f -> f d"),
    Row("moe/wo", f"{theirs}.experts.{{expert}}.{down}.weight", "e f d -> d f"),
  )


def require(hf: Mapping[str, Any], **values: Any) -> None:
  """Raises UserError unless config.json has these values, or lacks the key."""
  for name, value in values.items():
    if hf.get(name, value) != value:
      raise UserError(
        f"config.json has {name}={hf[name]!r}, and maxlite knows this family with {name}={value!r} "
        "only: choose another checkpoint"
      )


def decoder_from_hf(
  hf: Mapping[str, Any],
  *,
  activation: str = "silu",
  attention_bias: bool = False,
  tied: bool = False,
  rope: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
  """The keys of everything but the MLP and what is a family's own.

  Args:
    activation, attention_bias: what the family always has.
    tied: what a config.json means that does not say.
    rope: where the rotary embedding's keys are, if not in `hf`.
  """
  heads, width = hf["num_attention_heads"], hf["hidden_size"]
  require(hf, hidden_act=activation, hidden_activation=activation)
  require(hf, attention_bias=attention_bias, mlp_bias=False)
  return {
    "vocab_size": hf["vocab_size"],
    "base_emb_dim": width,
    "base_num_decoder_layers": hf["num_hidden_layers"],
    "base_num_query_heads": heads,
    "base_num_kv_heads": hf.get("num_key_value_heads") or heads,
    "head_dim": hf.get("head_dim") or width // heads,
    "mlp_activations": (ACTIVATIONS[activation], "linear"),
    "logits_via_embedding": hf.get("tie_word_embeddings", tied),
    "normalization_layer_epsilon": hf["rms_norm_eps"],
    **rope_from_hf(hf if rope is None else rope),
  }


def decoder_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """The inverse of decoder_from_hf."""
  return {
    "vocab_size": cfg.vocab_size,
    "hidden_size": cfg.base_emb_dim,
    "num_hidden_layers": cfg.base_num_decoder_layers,
    "num_attention_heads": cfg.base_num_query_heads,
    "num_key_value_heads": cfg.base_num_kv_heads,
    "head_dim": cfg.head_dim,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": cfg.logits_via_embedding,
    "rms_norm_eps": cfg.normalization_layer_epsilon,
    **rope_to_hf(cfg),
  }


def rope_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Keys of the rotary embedding, in either spelling of config.json.

  Newer files have `rope_parameters`; older ones `rope_theta` and, where stretched, `rope_scaling`.
  """
  older_theta, older = hf.get("rope_theta"), hf.get("rope_scaling")
  rope = hf.get("rope_parameters") or older or {}
  kind = rope.get("rope_type") or rope.get("type") or "default"
  theta = rope.get("rope_theta") or older_theta or 10_000.0
  keys = {"rope_type": kind, "rope_max_timescale": float(theta)}
  if kind not in ROPES:
    raise UserError(
      f"config.json has a rotary embedding of type {kind!r}; maxlite knows {', '.join(ROPES)}"
    )
  return keys | ROPES[kind](rope, hf)


def _yarn_from_hf(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
  require(rope, beta_slow=1, attention_factor=None)
  mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
  if mscale != all_dims:
    raise UserError(
      f"config.json has mscale={mscale} and mscale_all_dim={all_dims}, and maxlite knows yarn with "
      "one value for both only: choose another checkpoint"
    )
  original = rope.get("original_max_position_embeddings") or hf["max_position_embeddings"]
  return {
    "rope_factor": float(rope["factor"]),
    "original_max_position_embeddings": original,
    "mscale": float(mscale or 0.0),
    "beta_fast": float(rope.get("beta_fast") or 32),
    "rope_truncate": rope.get("truncate", True),
  }


def _linear_from_hf(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
  return {"rope_factor": float(rope["factor"])}


def _llama3_from_hf(rope: Mapping[str, Any], hf: Mapping[str, Any]) -> dict[str, Any]:
  require(rope, low_freq_factor=1, high_freq_factor=4)
  return {
    "rope_type": "llama3.1",
    "rope_factor": float(rope["factor"]),
    "original_max_position_embeddings": rope["original_max_position_embeddings"],
  }


ROPES = {
  "default": lambda rope, hf: {},
  "linear": _linear_from_hf,
  "llama3": _llama3_from_hf,
  "yarn": _yarn_from_hf,
}


def rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """`rope_parameters`, and the older spelling for tools that know no other."""
  rope, kind = cfg.rope, cfg.rope.rope_type
  scaling: dict[str, Any] = {"rope_type": "llama3" if kind == "llama3.1" else kind}
  if kind != "default":
    scaling |= {"factor": rope.rope_factor}
  if kind in ("llama3.1", "yarn"):
    scaling |= {"original_max_position_embeddings": rope.original_max_position_embeddings}
  if kind == "llama3.1":
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
  if kind == "yarn":
    scaling |= {"beta_fast": rope.beta_fast, "beta_slow": 1, "truncate": rope.rope_truncate}
    scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale} if rope.mscale else {}
  theta = {"rope_theta": rope.rope_max_timescale}
  keys = {"rope_parameters": scaling | theta, **theta}
  if kind == "default":
    return keys
  length = int(rope.original_max_position_embeddings * rope.rope_factor)
  return keys | {"rope_scaling": scaling, "max_position_embeddings": length}


def layer_types(num_layers: int, global_every: int) -> list[str]:
  """config.json's `layer_types`: every so many layers the last is global; 0: all are."""
  return [
    "sliding_attention" if global_every and (i + 1) % global_every else "full_attention"
    for i in range(num_layers)
  ]


def require_layer_types(hf: Mapping[str, Any], global_every: int) -> None:
  """Raises UserError unless layers that attend locally stand where those of the family do."""
  require(hf, sliding_window_pattern=global_every, _sliding_window_pattern=global_every)
  if hf.get("layer_types"):
    require(hf, layer_types=layer_types(hf["num_hidden_layers"], global_every))


def every_layer_is_moe(hf: Mapping[str, Any]) -> None:
  """Raises UserError where config.json makes some layers of a mixture dense."""
  require(hf, decoder_sparse_step=1)
  if hf.get("mlp_only_layers"):
    raise UserError("config.json has mlp_only_layers, which maxlite has no layers for")
