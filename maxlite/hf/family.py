"""A Hugging Face model family as data: the keys of its config.json and the names of its tensors."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig, flatten

ConfigJson = Mapping[str, Any]
REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class Key:
  """A config key and the key of config.json with the same value."""

  ours: str
  theirs: str
  default: Any = REQUIRED  # value if config.json lacks the key or has null
  alias: str = ""  # another spelling that is read
  writes_null: bool = False  # whether the default is written as null


def read_keys(keys: Sequence[Key], hf: Mapping[str, Any]) -> dict[str, Any]:
  """Return our keys with the values of config.json."""
  values = {}
  for key in keys:
    name = key.alias if key.alias in hf and key.theirs not in hf else key.theirs
    value = hf[name] if key.default is REQUIRED else hf.get(name)
    use_default = value is None and key.default is not REQUIRED
    values[key.ours] = key.default if use_default else value
  return values


def write_keys(keys: Sequence[Key], flat: Mapping[str, Any]) -> dict[str, Any]:
  """Return the keys of config.json with the values of our flat keys; the inverse of read_keys."""
  is_null = lambda key: key.writes_null and flat[key.ours] == key.default
  return {key.theirs: None if is_null(key) else flat[key.ours] for key in keys}


def require(hf: Mapping[str, Any], **values: Any) -> None:
  """Raise UserError unless config.json has these values, null, or no such keys."""
  for name, value in values.items():
    if hf.get(name) not in (None, value):
      raise UserError(
        f"config.json has {name}={hf[name]!r}, but maxlite supports only {name}={value!r} here: "
        "choose another checkpoint"
      )


_FACTOR = Key("rope_factor", "factor")
_ORIGINAL = Key("original_max_position_embeddings", "original_max_position_embeddings")
ROPE_KEYS: dict[str, Sequence[Key]] = {
  "default": (),
  "linear": (_FACTOR,),
  "llama3": (_FACTOR, _ORIGINAL),
  "yarn": (
    _FACTOR,
    _ORIGINAL,
    Key("beta_fast", "beta_fast", 32.0),
    Key("rope_truncate", "truncate", True),
    Key("mscale", "mscale", 0.0),
  ),
}
ROPE_REQUIRED = {
  "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
  "yarn": {"beta_slow": 1},
}
ROPE_TYPES = {"llama3": "llama3.1"}  # config.json's rope_type: ours, where they differ


def rope_from_hf(hf: Mapping[str, Any]) -> dict[str, Any]:
  """Return our keys of the rotary embedding.

  Newer files have `rope_parameters`, older ones `rope_theta` and, if scaled, `rope_scaling`.
  """
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  kind = rope.get("rope_type") or rope.get("type") or "default"
  thetas = (rope.get("rope_theta"), hf.get("rope_theta"), 10_000.0)
  theta = next(theta for theta in thetas if theta is not None)
  if kind not in ROPE_KEYS:
    raise UserError(
      f"config.json has a rotary embedding of type {kind!r}; supported are {', '.join(ROPE_KEYS)}"
    )
  require(rope, partial_rotary_factor=1.0, **ROPE_REQUIRED.get(kind, {}))
  require(hf, partial_rotary_factor=1.0)
  if kind == "yarn":
    require(rope, attention_factor=None)
    mscale, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
    if mscale != all_dims:
      raise UserError(
        f"config.json has mscale={mscale} and mscale_all_dim={all_dims}, but maxlite supports yarn "
        "only with one value for both: choose another checkpoint"
      )
    if not rope.get(_ORIGINAL.theirs):
      rope = {**rope, _ORIGINAL.theirs: hf["max_position_embeddings"]}
  keys = {"rope_type": ROPE_TYPES.get(kind, kind), "rope_max_timescale": float(theta)}
  return keys | read_keys(ROPE_KEYS[kind], rope)


def rope_to_hf(cfg: ModelConfig) -> dict[str, Any]:
  """Return both forms of config.json, for tools that read only the older one."""
  rope = cfg.rope
  types = {ours: theirs for theirs, ours in ROPE_TYPES.items()}
  kind = types.get(rope.rope_type, rope.rope_type)
  scaling = {"rope_type": kind, **write_keys(ROPE_KEYS[kind], flatten(rope))}
  scaling |= ROPE_REQUIRED.get(kind, {})
  if scaling.pop("mscale", 0.0) and cfg.family.latent_attention:
    scaling |= {"mscale": rope.mscale, "mscale_all_dim": rope.mscale}
  theta = {"rope_theta": rope.rope_max_timescale}
  keys = {"rope_parameters": scaling | theta, **theta}
  if kind == "default":
    return keys
  length = int(rope.original_max_position_embeddings * rope.rope_factor)
  return keys | {"rope_scaling": scaling, "max_position_embeddings": length}


@dataclasses.dataclass(frozen=True)
class TensorRule:
  """Maps a parameter to a tensor of a checkpoint.

  `ours` is the path of the parameter, in rules of a block relative to the layer; several paths of
  one shape if a tensor holds several parameters. `theirs` is the name of the tensor, with {expert}
  for the number of the expert. `axes` describes the layout in the notation of tensor_mapping.py:
  axes have any letters, except that `e` counts {expert} and `g` the several parameters, and both
  come first:

    TensorRule("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c) d")
    TensorRule("moe/wi_0", "mlp.experts.{expert}.gate_proj.weight", "e d f -> f d")
    TensorRule(("moe/wi_0", "moe/wi_1"), "mlp.experts.gate_up_proj", "g e d f -> e d (f g)")
  """

  ours: str | tuple[str, ...]
  theirs: str
  axes: str

  @property
  def paths(self) -> tuple[str, ...]:
    return (self.ours,) if isinstance(self.ours, str) else self.ours


OUTER = (
  TensorRule("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
  TensorRule("final_norm/scale", "model.norm.weight", "d -> d"),
  TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
)
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
DECODER_KEYS = (
  Key("vocab_size", "vocab_size"),
  Key("base_emb_dim", "hidden_size"),
  Key("base_num_decoder_layers", "num_hidden_layers"),
  Key("base_num_query_heads", "num_attention_heads"),
  Key("normalization_layer_epsilon", "rms_norm_eps"),
)


@dataclasses.dataclass(frozen=True)
class HfFamily:
  """One `model_type` of config.json.

  Its keys are read by `config_from_hf` and written by `config_to_hf`, its inverse: keys that change
  what the model computes must survive the round trip, otherwise the export is refused. The exporter
  writes model_type, architectures, dtype, lengths and token ids. Rules for parameters that a model
  does not have are skipped.
  """

  model_type: str
  architecture: str  # of config.json's `architectures`
  decoder_block: str  # of MODELS
  block: Sequence[TensorRule]  # rules of a layer
  keys: Sequence[Key] = ()  # in addition to DECODER_KEYS
  ours: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # our keys of all its models
  # Keys that config.json must have with these values, or lack.
  required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  activation: str = "silu"
  activation_key: str = "hidden_act"
  tied: bool = False  # default of tie_word_embeddings
  checks_layer_types: bool = False  # whether local and global layers must follow MODELS
  aux_loss_key: str = ""  # load balance loss weight, written but not read
  # What keys cannot express: (config.json, our keys) -> more of our keys, config -> more of theirs.
  extra_from_hf: Callable[[ConfigJson, Mapping[str, Any]], dict[str, Any]] = lambda hf, keys: {}
  extra_to_hf: Callable[[ModelConfig], dict[str, Any]] = lambda cfg: {}
  rope_from_hf: Callable[[ConfigJson], dict[str, Any]] = rope_from_hf
  rope_to_hf: Callable[[ModelConfig], dict[str, Any]] = rope_to_hf
  extra_block: Callable[[ModelConfig], Sequence[TensorRule]] = lambda cfg: ()
  outer: Sequence[TensorRule] = OUTER  # rules outside of layers
  layer_prefix: str = "model.layers.{layer}."  # of the tensors of `block`
  ignored: Sequence[str] = (r".*\.rotary_emb\.inv_freq",)  # regexes of tensors without weights
  unread: Sequence[str] = ()  # keys of config.json without effect in this family
  quantized: str = ""  # quant_method of config.json that can be read, such as mxfp4

  def config_from_hf(self, hf: ConfigJson) -> dict[str, Any]:
    require(hf, hidden_act=self.activation, hidden_activation=self.activation)
    require(hf, attention_bias=MODELS[self.decoder_block].out_bias, mlp_bias=False)
    require(hf, **self.required)
    if self.checks_layer_types:
      self._require_layer_types(hf)
    heads, kv_heads = hf["num_attention_heads"], hf.get("num_key_value_heads")
    keys = read_keys(DECODER_KEYS, hf) | {
      "base_num_kv_heads": heads if kv_heads is None else kv_heads,
      "head_dim": hf.get("head_dim") or hf["hidden_size"] // heads,
      "mlp_activations": (ACTIVATIONS[self.activation], "linear"),
      "logits_via_embedding": hf.get("tie_word_embeddings", self.tied),
    }
    keys |= self.rope_from_hf(hf) | read_keys(self.keys, hf) | self.ours
    if not MODELS[self.decoder_block].latent_attention:
      require(keys, mscale=0.0)  # others have no factor of attention scores
    return keys | self.extra_from_hf(hf, keys)

  def config_to_hf(self, cfg: ModelConfig) -> dict[str, Any]:
    flat, model = flatten(cfg), MODELS[self.decoder_block]
    hf = write_keys((*DECODER_KEYS, *self.keys), flat) | {
      "num_key_value_heads": cfg.base_num_kv_heads,
      "head_dim": cfg.head_dim,
      self.activation_key: self.activation,
      "attention_bias": model.out_bias,
      "tie_word_embeddings": cfg.logits_via_embedding,
      **self.rope_to_hf(cfg),
      **self.required,
    }
    if self.checks_layer_types and model.global_layer_every:
      hf["layer_types"] = self._layer_types(cfg.base_num_decoder_layers)
    if self.aux_loss_key:
      hf[self.aux_loss_key] = cfg.moe.load_balance_loss_weight
    return hf | self.extra_to_hf(cfg)

  def block_rules(self, cfg: ModelConfig) -> list[TensorRule]:
    return [*self.block, *self.extra_block(cfg)]

  def _layer_types(self, num_layers: int) -> list[str]:
    every = MODELS[self.decoder_block].global_layer_every
    is_local = [bool(every and (i + 1) % every) for i in range(num_layers)]
    return ["sliding_attention" if local else "full_attention" for local in is_local]

  def _require_layer_types(self, hf: ConfigJson) -> None:
    every = MODELS[self.decoder_block].global_layer_every
    require(hf, sliding_window_pattern=every, _sliding_window_pattern=every)
    if hf.get("layer_types"):
      require(hf, layer_types=self._layer_types(hf["num_hidden_layers"]))


# Rules and keys that several families share.
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
