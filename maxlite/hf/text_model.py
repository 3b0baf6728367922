"""Folders of models that read images or sound too: their part that reads text.

Their config.json has the text model's as `text_config`, and the names of its tensors have one
module more.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path

from maxlite.errors import UserError
from maxlite.hf.family import OF_DECODERS, WITHOUT_EFFECT, HfFamily, TensorRule
from maxlite.hf.hf_folder import TensorEntry
from maxlite.hf.tensor_mapping import axis_layout
from maxlite.storage.json_values import Json, JsonObject

TEXT = "text_config"
_TIED = "tie_word_embeddings"
_QUANTIZATION = "quantization_config"
# Keys next to text_config that concern other inputs than text.
_OF_OTHER_INPUTS = (
  r"(image|video|vision|audio|media|projection|bo[ai]|eo[ai])_.*"
  r"|mm_tokens_per_image|multimodal_projector_bias|projector_hidden_act|spatial_merge_size"
  r"|use_unified_vision_chunk"
)
_MROPE = "mrope"  # for text, the default rotary embedding: its positions are alike on all axes


@dataclasses.dataclass(frozen=True)
class LargerModel:
  """A model_type that has one of the families as its text model."""

  # The family by the model_type in text_config, which may be missing for the first.
  families: Mapping[str, str]
  # Values of keys that text_config lacks, where transformers has a class for it that the family
  # does not have. An export writes them.
  defaults: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  # Keys of text_config that must be missing or have these values, since only a text model that is
  # not a part of a larger one reads others.
  required: Mapping[str, Json] = dataclasses.field(default_factory=dict)
  is_flat: bool = False  # files without text_config have its keys next to those of images


_QWEN2_VL_TEXT = {
  "vocab_size": 152064,
  "hidden_size": 8192,
  "intermediate_size": 29568,
  "num_hidden_layers": 80,
  "num_attention_heads": 64,
  "num_key_value_heads": 8,
  "max_position_embeddings": 32768,
  "rms_norm_eps": 1e-5,
  "rope_theta": 1e6,
}
_QWEN3_VL_TEXT = {
  "max_position_embeddings": 128000,
  "rope_theta": 500_000.0,
}
_QWEN3_VL_MOE_TEXT = {
  **_QWEN3_VL_TEXT,
  "intermediate_size": 5632,
  "moe_intermediate_size": 1408,
  "num_attention_heads": 16,
  "num_key_value_heads": 16,
  "num_experts_per_tok": 4,
  "num_experts": 60,
  "norm_topk_prob": True,
}
LARGER_MODELS = {
  "gemma3": LargerModel({"gemma3_text": "gemma3_text"}, required={"final_logit_softcapping": None}),
  "gemma4": LargerModel({"gemma4_text": "gemma4_text"}),
  "llama4": LargerModel({"llama4_text": "llama4_text"}),
  "mistral3": LargerModel(
    {"mistral": "mistral", "ministral3": "ministral3", "mistral4": "mistral4"}
  ),
  "qwen2_vl": LargerModel({"qwen2_vl_text": "qwen2"}, _QWEN2_VL_TEXT, is_flat=True),
  "qwen2_5_vl": LargerModel({"qwen2_5_vl_text": "qwen2"}, _QWEN2_VL_TEXT, is_flat=True),
  "qwen3_vl": LargerModel({"qwen3_vl_text": "qwen3"}, _QWEN3_VL_TEXT),
  # Its class always divides the weights of experts by their sum.
  "qwen3_vl_moe": LargerModel(
    {"qwen3_vl_moe_text": "qwen3_moe"}, _QWEN3_VL_MOE_TEXT, required={"norm_topk_prob": True}
  ),
  "kimi_k25": LargerModel({"deepseek_v3": "deepseek_v3", "kimi_k2": "kimi_k2"}),
  "qwen3_5": LargerModel({"qwen3_5_text": "qwen3_5_text"}),
  "qwen3_5_moe": LargerModel({"qwen3_5_moe_text": "qwen3_5_moe_text"}),
}


@dataclasses.dataclass(frozen=True)
class TensorNames:
  """How a larger model names tensors: the prefixes of its text model, a regex of the others."""

  model: str
  output: str
  other_parts: str


_MODEL = "model."
_OUTPUT = "lm_head."
# The layers of a kimi_k25 that transformers 5.23 saved: it renames them with those for images.
_BLOCKS = "blocks."
_ENCODERS = r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector|mm_projector)\..*"
# The first whose embedding a folder has: of transformers since 4.52, before, and of Qwen2-VL then.
_NAMES = (
  TensorNames("model.language_model.", _OUTPUT, r"model\.(?!language_model\.).*"),
  TensorNames("language_model.model.", "language_model.lm_head.", _ENCODERS),
  TensorNames(_MODEL, _OUTPUT, _ENCODERS),
)


def text_values(values: JsonObject, file: Path) -> JsonObject:
  """Return the text model's config.json, given the `values` of a larger model's.

  Raises:
    UserError: it is missing or of another type, or another key may change what the model computes.
  """
  larger = LARGER_MODELS[values["model_type"]]
  default_type = next(iter(larger.families))
  text = values.get(TEXT)
  if larger.is_flat and TEXT not in values:
    text = {name: value for name, value in values.items() if not _is_of_other_inputs(name)}
    text["model_type"] = default_type
  if not isinstance(text, dict):
    raise UserError(f"{file} has {TEXT}={text!r}, not an object: copy it again")
  model_type = text.get("model_type", default_type)
  if model_type not in larger.families:
    supported = " or ".join(map(repr, larger.families))
    raise UserError(
      f"{file} has model_type={model_type!r} in {TEXT}, but maxlite supports only {supported} "
      "there: choose another checkpoint"
    )
  tied = values.get(_TIED, text.get(_TIED))
  if text.get(_TIED, tied) != tied:
    raise UserError(
      f"{file} has {_TIED}={tied}, but {text[_TIED]} in {TEXT}: remove one of the two"
    )
  if TEXT in values:
    _require_no_others(values, file)
  for name, value in larger.required.items():
    if text.get(name, value) != value:
      raise UserError(
        f"{file} has {name}={text[name]!r} in {TEXT}, but maxlite supports only {name}={value!r} "
        "there: choose another checkpoint"
      )
  text = {**larger.defaults, **text, "model_type": larger.families[model_type]}
  if larger.defaults:
    text = _without_mrope(text)
  if tied is None:
    return text
  return text | {_TIED: tied}


def quantization_of(values: JsonObject) -> Json:
  """Return `quantization_config` of a config.json, or of its text model."""
  text = values.get(TEXT)
  found = values.get(_QUANTIZATION)
  if not found and isinstance(text, dict):
    found = text.get(_QUANTIZATION)
  return found


def _require_no_others(values: JsonObject, file: Path) -> None:
  """Raise UserError for keys next to text_config that may concern text."""
  known = WITHOUT_EFFECT | {TEXT, _TIED}
  for name in sorted(set(values) - known):
    is_neutral = name in OF_DECODERS and values[name] == OF_DECODERS[name]
    if not is_neutral and not _is_of_other_inputs(name):
      raise UserError(
        f"{file} has {name} beside {TEXT}, which maxlite does not read and which may change what "
        "the model computes: remove it, or choose another checkpoint"
      )


def _is_of_other_inputs(name: str) -> bool:
  return bool(re.fullmatch(_OF_OTHER_INPUTS, name))


def _without_mrope(text: JsonObject) -> JsonObject:
  """Return `text` with a rotary embedding for text alone."""
  changed = dict(text)
  for name in ("rope_scaling", "rope_parameters"):
    if isinstance(text.get(name), dict):
      rope = {key: value for key, value in text[name].items() if not key.startswith(_MROPE)}
      for key in ("type", "rope_type"):
        if rope.get(key) == _MROPE:
          rope[key] = "default"
      changed[name] = rope
  return changed


def nested(family: HfFamily, tensors: Collection[str]) -> HfFamily:
  """Return `family` with the names that its `tensors` have as a part of a larger model."""
  names = _names_of(tensors)
  outer = []
  for rule in family.outer:
    theirs = rule.theirs
    for prefix, renamed in ((_MODEL, names.model), (_OUTPUT, names.output)):
      theirs = re.sub(rf"^{re.escape(prefix)}", renamed, theirs)
    outer.append(dataclasses.replace(rule, theirs=theirs))
  layer_prefix = re.sub(rf"^{re.escape(_MODEL)}", names.model, family.layer_prefix)
  if any(name.startswith(f"{names.model}{_BLOCKS}") for name in tensors):
    layer_prefix = layer_prefix.replace("layers.", _BLOCKS)
  return dataclasses.replace(
    family,
    outer=outer,
    layer_prefix=layer_prefix,
    ignored=(*family.ignored, names.other_parts),
  )


def _names_of(tensors: Collection[str]) -> TensorNames:
  for names in _NAMES:
    if f"{names.model}embed_tokens.weight" in tensors:
      return names
  return _NAMES[0]


def without_base_prefix(family: HfFamily, tensors: Collection[str]) -> HfFamily:
  """Return `family` with the names that its `tensors` have, which may lack its `base_prefix`."""
  prefix = family.base_prefix
  if not prefix or any(name.startswith(prefix) for name in tensors):
    return family
  outer = []
  for rule in family.outer:
    outer.append(dataclasses.replace(rule, theirs=rule.theirs.removeprefix(prefix)))
  return dataclasses.replace(
    family, outer=outer, layer_prefix=family.layer_prefix.removeprefix(prefix)
  )


def other_parts(family: HfFamily, tensors: Collection[str]) -> set[str]:
  """Return the modules of the larger model that `nested` families leave out."""
  names = _names_of(tensors)
  parts = set()
  if names.other_parts in family.ignored:
    for name in tensors:
      if re.fullmatch(names.other_parts, name):
        parts.add(".".join(name.split(".")[: 1 + name.startswith(_MODEL)]))
  return parts


def with_alternatives(family: HfFamily, tensors: Mapping[str, TensorEntry], width: int) -> HfFamily:
  """Return `family` with its alternative rules whose tensors exist.

  Args:
    family: the family.
    tensors: the tensors of a folder.
    width: the size of axis `d`, by which alternatives for the same tensor are told apart.
  """
  by_ending = {}
  for name, tensor in tensors.items():
    by_ending[name.rpartition(".layers.")[2].partition(".")[2]] = tensor
  block = list(family.block)
  for alternative in family.alternatives:
    found = by_ending.get(alternative.theirs)
    if found is not None and _fits(alternative, found, width):
      block = [rule for rule in block if not _is_part(rule, alternative)]
      block.append(alternative)
  return dataclasses.replace(family, block=block)


def _fits(rule: TensorRule, tensor: TensorEntry, width: int) -> bool:
  """Return whether the tensor has the width of the model where the rule has axis `d`."""
  axes = axis_layout(rule.axes).theirs
  return len(tensor.shape) == len(axes) and tensor.shape[axes.index(("d",))] == width


def _is_part(rule: TensorRule, other: TensorRule) -> bool:
  return set(rule.paths) <= set(other.paths)
