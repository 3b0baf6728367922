"""A Hugging Face model family as data: the keys of its config.json and the names of its tensors."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence

from maxlite.config.model_families import MODELS
from maxlite.config.schema import ModelConfig, flatten
from maxlite.errors import UserError
from maxlite.hf.config_json import ConfigJson, Key, read_keys, write_keys
from maxlite.hf.hf_rope import ROPE_KEYS, rope_from_hf, rope_to_hf
from maxlite.hf.layer_types import SLIDING, global_layers_from_hf
from maxlite.storage.json_values import Json, JsonObject

# Keys without effect on what a model computes from its weights. Keys of losses and dropout concern
# training, which uses our own keys.
WITHOUT_EFFECT = {
  # Of the file, the tokenizer and the number format.
  "_commit_hash", "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype",
  "eos_token_id", "max_position_embeddings", "model_type", "name_or_path", "pad_token_id",
  "quantization_config", "sep_token_id", "tokenizer_class", "torch_dtype", "transformers_version",
  "tie_encoder_decoder", "unsloth_fixed", "unsloth_version",
  # Of training, of other tasks, and of outputs.
  "attention_dropout", "aux_loss_alpha", "finetuning_task", "id2label", "initializer_range",
  "label2id", "num_labels", "output_attentions", "output_hidden_states", "output_router_logits",
  "problem_type", "return_dict", "router_aux_loss_coef", "router_jitter_noise", "seq_aux",
  "task_specific_params", "gradient_checkpointing", "ignore_index", "neftune_noise_alpha",
  "tf_legacy_loss",
  # Of the implementation.
  "_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal",
  "_flash_attn_2_enabled", "attn_implementation", "chunk_size_feed_forward",
  "_experts_implementation", "is_decoder", "is_llama_config", "xla_device",
  "cache_implementation", "ep_size", "pretraining_tp", "torchscript", "use_bfloat16", "use_cache",
  # Of generation.
  "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty",
  "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
  "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
  "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups",
  "num_beams", "num_return_sequences", "output_scores", "remove_invalid_values",
  "repetition_penalty", "return_dict_in_generate", "suppress_tokens", "temperature", "top_k",
  "top_p", "typical_p",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TensorRule:
  """Maps a parameter to a tensor of a checkpoint.

  `ours` is the path of the parameter, in rules of a block relative to the layer; several paths of
  one shape if a tensor holds several parameters. `theirs` is the name of the tensor, with {expert}
  for the number of the expert. Parameters whose rules have the same tensor are concatenated along
  its rows, in the order of the rules. `axes` describes the layout in the notation of
  tensor_mapping.py: axes have any letters, except that `e` counts {expert} and `g` the several
  parameters, and both come first:

    TensorRule("attention/query/kernel", "self_attn.q_proj.weight", "d h c -> (h c) d")
    TensorRule("moe/wi_0", "mlp.experts.{expert}.gate_proj.weight", "e d f -> f d")
    TensorRule(("moe/wi_0", "moe/wi_1"), "mlp.experts.gate_up_proj", "g e d f -> e d (f g)")
  """

  ours: str | tuple[str, ...]
  theirs: str
  axes: str

  @property
  def paths(self) -> tuple[str, ...]:
    """The paths in `ours`, one or several."""
    if isinstance(self.ours, str):
      return (self.ours,)
    return self.ours


@dataclasses.dataclass(frozen=True)
class MtpTensors:
  """The tensors of a family's layers of multi-token prediction (models/mtp.py).

  Prefixes have {layer} for the number of the layer, counted after those of the decoder. A family
  whose prefixes do not have it has at most one such layer.
  """

  prefix: str  # of the tensors of a layer
  block_prefix: str  # of those of its decoder layer, which are named as the family's others
  module: Sequence[TensorRule]  # rules of the other parameters of a layer, relative to it
  # Rules of parameters outside of the layers, of which each layer has a copy.
  copies: Sequence[TensorRule] = ()
  key: str = "num_nextn_predict_layers"  # of config.json: the number of layers
  default: int = 0  # the number if config.json lacks the key

  @property
  def projection(self) -> str:
    """The name of a tensor that every layer has and that no other layer has."""
    (name,) = (rule.theirs for rule in self.module if rule.ours == "projection/kernel")
    return name

  def prefixes(self, first_layer: int, num_layers: int) -> list[str]:
    """Return the prefix of each layer, of which the first is layer `first_layer` of the model."""
    numbers = range(first_layer, first_layer + num_layers)
    return [self.prefix.format(layer=number) for number in numbers]

  def stored_prefixes(self, first_layer: int, tensors: Collection[str]) -> list[str]:
    """Return the prefixes of the layers that a checkpoint has."""
    stored = []
    for prefix in self.prefixes(first_layer, len(tensors)):
      if prefix + self.projection not in tensors or prefix in stored:
        break
      stored.append(prefix)
    return stored


# As DeepSeek-V3 names them: one more layer of the decoder, with further tensors.
MTP_LAYER = MtpTensors(
  prefix="model.layers.{layer}.",
  block_prefix="model.layers.{layer}.",
  module=(
    TensorRule("embedding_norm/scale", "enorm.weight", "d -> d"),
    TensorRule("hidden_norm/scale", "hnorm.weight", "d -> d"),
    TensorRule("projection/kernel", "eh_proj.weight", "f d -> d f"),
    TensorRule("final_norm/scale", "shared_head.norm.weight", "d -> d"),
  ),
  copies=(
    TensorRule("embed/embedding", "embed_tokens.weight", "v d -> v d"),
    TensorRule("unembed/kernel", "shared_head.head.weight", "d v -> v d"),
  ),
)
OUTER = (
  TensorRule("embed/embedding", "model.embed_tokens.weight", "v d -> v d"),
  TensorRule("final_norm/scale", "model.norm.weight", "d -> d"),
  TensorRule("unembed/kernel", "lm_head.weight", "d v -> v d"),
)
# config.json's activations: ours.
ACTIVATIONS = {
  "silu": "silu",
  "gelu_pytorch_tanh": "gelu",
  "gelu": "exact_gelu",
  "quick_gelu": "quick_gelu",
  "relu": "relu",
  "relu2": "squared_relu",
  "xielu": "xielu",
}
WITH_TENSORS = ("xielu",)  # of which only some families have the names
DECODER_KEYS: Sequence[Key] = (
  Key("vocab_size", "vocab_size"),
  Key("base_emb_dim", "hidden_size"),
  Key("base_num_decoder_layers", "num_hidden_layers"),
  Key("base_num_query_heads", "num_attention_heads"),
  Key("normalization_layer_epsilon", "rms_norm_eps"),
)


# Further pairs of our keys and those of config.json, for messages.
OTHER_NAMES = (
  ("base_num_kv_heads", "num_key_value_heads"),
  ("logits_via_embedding", "tie_word_embeddings"),
  ("base_mlp_dim", "intermediate_size"),
  ("base_moe_mlp_dim", "moe_intermediate_size"),
  ("num_experts_per_tok", "top_k_experts"),
)
# Names of the activations of ACTIVATIONS for which transformers has other formulas or spellings.
SYNONYMS: dict[str, tuple[str, ...]] = {
  "silu": ("swish",),
  "gelu_pytorch_tanh": ("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh"),
  "gelu": ("gelu_python",),
}
# Keys of older versions of transformers, whose other values concern encoders.
OF_DECODERS: dict[str, Json] = {
  "add_cross_attention": False,
  "cross_attention_hidden_size": None,
  "is_encoder_decoder": False,
  "prefix": None,
  "pruned_heads": {},
  "use_mrope": False,
}


def _nothing_more(hf: ConfigJson, keys: Mapping[str, Json]) -> JsonObject:
  return {}


def _no_more_keys(cfg: ModelConfig) -> JsonObject:
  return {}


def _no_groups(cfg: ModelConfig) -> dict[str, int]:
  return {}


def no_rope(_: ConfigJson | ModelConfig) -> JsonObject:
  """Return no keys of a rotary embedding, in families without one."""
  return {}


def heads_from_hf(hf: ConfigJson) -> JsonObject:
  """Return our keys of the key/value heads and their size."""
  return {"base_num_kv_heads": _num_kv_heads(hf), "head_dim": _head_dim(hf)}


def equal_heads_from_hf(heads: str, width: str) -> Callable[[ConfigJson], JsonObject]:
  """Return a function like `heads_from_hf` for models with as many key/value heads as query heads.

  Args:
    heads: the key of config.json of the number of heads.
    width: the key of the width of the model, which the heads divide.
  """

  def from_hf(hf: ConfigJson) -> JsonObject:
    return {"base_num_kv_heads": hf[heads], "head_dim": hf[width] // hf[heads]}

  return from_hf


def _no_more_ignored(cfg: ModelConfig) -> Sequence[str]:
  return ()


def _no_more_rules(cfg: ModelConfig) -> Sequence[TensorRule]:
  return ()


@dataclasses.dataclass(frozen=True)
class HfFamily:
  """One `model_type` of config.json.

  Its keys are read by `config_from_hf` and written by `config_to_hf`, its inverse: keys that change
  what the model computes must survive the round trip, otherwise the export is refused. The exporter
  writes model_type, architectures, dtype, lengths and token ids. Rules for parameters that a model
  does not have are skipped.
  """

  model_type: str
  architecture: str  # the entry of config.json's `architectures`
  decoder_block: str  # the key of its entry in MODELS
  block: Sequence[TensorRule]  # the rules of a layer
  keys: Sequence[Key] = ()  # in addition to `decoder_keys`
  decoder_keys: Sequence[Key] = DECODER_KEYS
  # The values of our keys that all models of the family share.
  ours: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  # Values of missing keys: those of the config class in transformers, and its `rope_theta`.
  defaults: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  nullable: Sequence[str] = ()  # keys of config.json that may be null
  # Keys that config.json must have with these values, or lack without another default.
  required: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  activation: str = "silu"  # "": any of ACTIVATIONS
  is_gated: bool = True  # whether the MLP has a gate
  activation_key: str = "hidden_act"
  activation_aliases: Sequence[str] = ()  # values of that key that mean the same activation
  partial_rotary: bool = False  # whether its heads may rotate only their first channels
  # Whether config.json may list local and global layers; other families than those with local
  # layers have global ones only.
  checks_layer_types: bool = False
  # Whether attention_bias of config.json is set; None: if the family's `out_bias` is.
  attention_bias: bool | None = None
  variants: Sequence[str] = ()  # further decoder blocks, which `extra_from_hf` returns
  aux_loss_key: str = ""  # load balance loss weight, written but not read
  # What keys cannot express: more of our keys, given config.json and our keys so far; and more keys
  # of config.json, given our config.
  extra_from_hf: Callable[[ConfigJson, Mapping[str, Json]], JsonObject] = _nothing_more
  extra_to_hf: Callable[[ModelConfig], JsonObject] = _no_more_keys
  heads_from_hf: Callable[[ConfigJson], JsonObject] = heads_from_hf
  rope_from_hf: Callable[[ConfigJson], JsonObject] = rope_from_hf
  rope_to_hf: Callable[[ModelConfig], JsonObject] = rope_to_hf
  extra_block: Callable[[ModelConfig], Sequence[TensorRule]] = _no_more_rules
  # Given our config, {the end of a tensor's name: n} of tensors whose rows are n groups, each with
  # the n-th part of every parameter that they hold.
  row_groups: Callable[[ModelConfig], Mapping[str, int]] = _no_groups
  outer: Sequence[TensorRule] = OUTER  # rules outside of layers
  layer_prefix: str = "model.layers.{layer}."  # precedes the names of the tensors of `block`
  # Begins the names of tensors, but not in files of a model that was saved without its output
  # projection. "": as `read_tensors` knows it.
  base_prefix: str = ""
  ignored: Sequence[str] = (r".*\.rotary_emb\.inv_freq",)  # regexes of tensors without weights
  # Given our config, more of them.
  extra_ignored: Callable[[ModelConfig], Sequence[str]] = _no_more_ignored
  mtp: MtpTensors | None = None  # of the layers of multi-token prediction, if it may have them
  unread: Sequence[str] = ()  # keys of config.json without effect in this family
  # Tensors of every layer, relative to it, that hold a number which our model has as a constant.
  constants: Mapping[str, float] = dataclasses.field(default_factory=dict)
  unwritten: Sequence[str] = ()  # keys of most families that this one's config.json does not have
  # Rules in place of those of `block` for the same parameters, where a folder has their tensors.
  alternatives: Sequence[TensorRule] = ()
  # Rules of routed experts in place of those of `block`, if peft supports only the tensors in which
  # transformers holds all experts.
  peft_experts: Sequence[TensorRule] = ()
  quantized: str = ""  # quant_method of config.json that can be read, such as mxfp4
  # The model_type of exports, if transformers has no class of the family's.
  class_type: str = ""

  @property
  def exported_as(self) -> str:
    """The model_type that an export has."""
    return self.class_type or self.model_type

  def config_from_hf(self, values: Mapping[str, Json]) -> JsonObject:
    """Return our keys for the content of a config.json.

    Raises:
      KeyError: a key is missing and has no default.
      UserError: a value is not supported, or a key is not known.
    """
    hf = ConfigJson(values, self.defaults, self.nullable)
    model = MODELS[self.decoder_block]
    hf.require(is_causal=True, attention_bias=self._attention_bias, mlp_bias=False)
    hf.require(**(OF_DECODERS | dict(self.required)))
    if "sliding_window" not in (*self.defaults, *self.unread):
      hf.require(sliding_window=None)
    keys = read_keys(self.decoder_keys, hf) | {
      "mlp_activations": self._mlp_activations(hf),
      "logits_via_embedding": hf["tie_word_embeddings"],
    }
    keys |= self.heads_from_hf(hf)
    keys |= self.rope_from_hf(hf) | read_keys(self.keys, hf)
    keys.update(self.ours)
    if self.checks_layer_types and hf.get("layer_types") is not None:
      listed = hf["layer_types"]
      keys |= global_layers_from_hf(hf, "layer_types", listed, SLIDING, self.decoder_block)
    if self.mtp:
      keys["mtp_num_layers"] = _mtp_num_layers(hf, self.mtp)
    if keys.get("mscale") and not model.reads("mla"):  # which alone scales the scores by it
      keys["mscale"] = 0.0
      keys["rope_attention_factor"] = keys["rope_attention_factor"] or 1.0
    if keys.get("partial_rotary_factor", 1) != 1 and not self.partial_rotary:
      raise UserError(
        f"config.json has partial_rotary_factor={keys['partial_rotary_factor']}, but maxlite "
        "supports only partial_rotary_factor=1.0 here: choose another checkpoint"
      )
    keys |= self.extra_from_hf(hf, keys)
    hf.require_no_others(WITHOUT_EFFECT | set(self.unread))
    return keys

  def key_names(self, values: Collection[str]) -> dict[str, str]:
    """Return {our key: the key with its value} for a config.json with the keys `values`."""
    names = {"rope_max_timescale": "rope_theta"}
    names |= {ours: theirs for ours, theirs in OTHER_NAMES if theirs in values}
    for key in (*self.decoder_keys, *self.keys, *itertools.chain(*ROPE_KEYS.values())):
      names[key.ours] = key.theirs
      if key.alias in values:
        names[key.ours] = key.alias
    return names

  def config_to_hf(self, cfg: ModelConfig) -> JsonObject:
    """Return the content of a config.json; the inverse of `config_from_hf`."""
    hf = write_keys((*self.decoder_keys, *self.keys), flatten(cfg))
    hf |= {
      "num_key_value_heads": cfg.base_num_kv_heads,
      "head_dim": cfg.head_dim,
      self.activation_key: self.activation or _their_activation(cfg.mlp_activations[0]),
      "attention_bias": self._attention_bias,
      "tie_word_embeddings": cfg.logits_via_embedding,
    }
    hf |= self.rope_to_hf(cfg)
    hf |= self.required
    if self.checks_layer_types and MODELS[self.decoder_block].global_layer_every:
      hf["layer_types"] = SLIDING.of_model(cfg)
    if self.aux_loss_key:
      hf[self.aux_loss_key] = cfg.moe.load_balance_loss_weight
    if self.mtp:
      hf[self.mtp.key] = cfg.mtp_num_layers
    hf |= self.extra_to_hf(cfg)
    for name in self.unwritten:
      hf.pop(name, None)
    return hf

  def block_rules(self, cfg: ModelConfig) -> list[TensorRule]:
    """Return the rules of a layer of the model `cfg`."""
    return [*self.block, *self.extra_block(cfg)]

  def _mlp_activations(self, hf: ConfigJson) -> tuple[str, ...]:
    """Return our names of the activation of config.json and of the MLP's linear part."""
    found = hf.get(self.activation_key)
    name = self.activation
    if not name:
      supported = [name for name in ACTIVATIONS if name not in WITH_TENSORS]
      name = next((name for name in supported if found in (name, *SYNONYMS.get(name, ()))), "")
    elif found not in (*self.activation_aliases, *SYNONYMS.get(name, ())):
      hf.require(**{self.activation_key: name})
    if not name:
      raise UserError(
        f"config.json has {self.activation_key}={found!r}, but maxlite supports only "
        f"{', '.join(supported)} here: choose another checkpoint"
      )
    ours = ACTIVATIONS[name]
    return (ours, "linear") if self.is_gated else (ours,)

  @property
  def _attention_bias(self) -> bool:
    if self.attention_bias is None:
      return MODELS[self.decoder_block].attention.out_bias
    return self.attention_bias


def _mtp_num_layers(hf: ConfigJson, mtp: MtpTensors) -> int:
  """Return the number of layers of multi-token prediction that config.json names."""
  num_layers = mtp.default
  if mtp.key in hf:
    num_layers = hf.get(mtp.key) or 0
  if num_layers > 1 and "{layer}" not in mtp.prefix:
    raise UserError(
      f"config.json has {mtp.key}={num_layers}, but maxlite supports only one layer of multi-token "
      "prediction here: choose another checkpoint"
    )
  return num_layers


def _their_activation(ours: str) -> str:
  """Return the name of one of our activations in config.json; of others ours."""
  names = {name: theirs for theirs, name in ACTIVATIONS.items()}
  return names.get(ours, ours)


def _num_kv_heads(hf: ConfigJson) -> int:
  """Return the number of key/value heads; null means one for each query head."""
  num_kv_heads = hf["num_key_value_heads"]
  if num_kv_heads is None:
    num_kv_heads = hf["num_attention_heads"]
  return num_kv_heads


def _head_dim(hf: ConfigJson) -> int:
  """Return the size of a head; classes without a default divide the width by the heads."""
  head_dim = None
  if not hf["num_attention_heads"]:
    raise UserError("config.json has num_attention_heads=0: write a number from 1")
  if "head_dim" in hf or hf.default("head_dim") is not None:
    head_dim = hf["head_dim"]
  if head_dim is None:
    head_dim = hf["hidden_size"] // hf["num_attention_heads"]
  return head_dim


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


def plain_mlp(ours: str, up: str, down: str) -> tuple[TensorRule, ...]:
  """Return the rules of an MLP without a gate, given its path and the prefixes of its tensors."""
  return (
    TensorRule(f"{ours}/wi_0/kernel", f"{up}.weight", "d f -> f d"),
    TensorRule(f"{ours}/wi_0/bias", f"{up}.bias", "f -> f"),
    TensorRule(f"{ours}/wo/kernel", f"{down}.weight", "f d -> d f"),
    TensorRule(f"{ours}/wo/bias", f"{down}.bias", "d -> d"),
  )


def layer_norm(ours: str, theirs: str) -> tuple[TensorRule, ...]:
  """Return the rules of a norm with a bias, given its path and the prefix of its tensors."""
  return (
    TensorRule(f"{ours}/scale", f"{theirs}.weight", "d -> d"),
    TensorRule(f"{ours}/bias", f"{theirs}.bias", "d -> d"),
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


def fused_experts(theirs: str) -> tuple[TensorRule, ...]:
  """Return the rules of gated experts of which two tensors hold all."""
  return (
    TensorRule(("moe/wi_0", "moe/wi_1"), f"{theirs}.gate_up_proj", "g e d f -> e (g f) d"),
    TensorRule("moe/wo", f"{theirs}.down_proj", "e f d -> e d f"),
  )


# The rules of most families' layers. Rules for parameters that a model does not have are skipped.
BLOCK = (*NORMS, *ATTENTION, *QKV_BIAS, *QK_NORM, *mlp("mlp", "mlp"))
DENSE_KEYS = (Key("base_mlp_dim", "intermediate_size"),)
MOE_KEYS = (
  Key("base_moe_mlp_dim", "intermediate_size"),
  Key("num_experts_per_tok", "num_experts_per_tok"),
)
SLIDING_WINDOW = Key("sliding_window_size", "sliding_window", null=0, off=0)
NORM_TOPK_PROB = Key("norm_topk_prob", "norm_topk_prob", null=False)
