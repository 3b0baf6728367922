"""Folders of models that read images or sound too: their part that reads text.

Their config.json has the text model's as `text_config`, and the names of its tensors have one
module more.
"""

import dataclasses
import re
from collections.abc import Collection
from pathlib import Path

from maxlite.errors import UserError
from maxlite.hf.family import OF_DECODERS, WITHOUT_EFFECT, HfFamily, TensorRule
from maxlite.storage.json_values import JsonObject

TEXT = "text_config"
_MODEL = "model."
_TEXT_MODEL = "model.language_model."
_OTHER_PARTS = r"model\.(?!language_model\.).*"  # tensors of encoders and of their projections
_TIED = "tie_word_embeddings"
# Keys next to text_config that concern other inputs than text.
_OF_OTHER_INPUTS = r"(image|video|vision|audio|bo[ai]|eo[ai])_.*"


def text_values(values: JsonObject, family: HfFamily, file: Path) -> JsonObject:
  """Return `text_config` of a config.json, which `family` reads.

  Raises:
    UserError: it is missing or of another type, or another key may change what the model computes.
  """
  text = values.get(TEXT)
  if not isinstance(text, dict):
    raise UserError(f"{file} has {TEXT}={text!r}, not an object: copy it again")
  model_type = text.get("model_type", family.model_type)
  if model_type != family.model_type:
    raise UserError(
      f"{file} has model_type={model_type!r} in {TEXT}, but maxlite supports only "
      f"{family.model_type!r} there: choose another checkpoint"
    )
  tied = values.get(_TIED, text.get(_TIED))
  if text.get(_TIED, tied) != tied:
    raise UserError(
      f"{file} has {_TIED}={tied}, but {text[_TIED]} in {TEXT}: remove one of the two"
    )
  known = WITHOUT_EFFECT | {TEXT, _TIED}
  for name in sorted(set(values) - known):
    is_neutral = name in OF_DECODERS and values[name] == OF_DECODERS[name]
    if not is_neutral and not re.fullmatch(_OF_OTHER_INPUTS, name):
      raise UserError(
        f"{file} has {name} beside {TEXT}, which maxlite does not read and which may change what "
        "the model computes: remove it, or choose another checkpoint"
      )
  if tied is None:
    return text
  return text | {_TIED: tied}


def nested(family: HfFamily) -> HfFamily:
  """Return `family` with the names of tensors that it has as a part of a larger model."""
  outer = []
  for rule in family.outer:
    theirs = re.sub(rf"^{re.escape(_MODEL)}", _TEXT_MODEL, rule.theirs)
    outer.append(dataclasses.replace(rule, theirs=theirs))
  return dataclasses.replace(
    family,
    outer=outer,
    layer_prefix=re.sub(rf"^{re.escape(_MODEL)}", _TEXT_MODEL, family.layer_prefix),
    ignored=(*family.ignored, _OTHER_PARTS),
  )


def other_parts(family: HfFamily, tensors: Collection[str]) -> set[str]:
  """Return the modules of the larger model that `nested` families leave out."""
  parts = set()
  if _OTHER_PARTS in family.ignored:
    for name in tensors:
      if re.fullmatch(_OTHER_PARTS, name):
        parts.add(".".join(name.split(".")[:2]))
  return parts


def with_alternatives(family: HfFamily, tensors: Collection[str]) -> HfFamily:
  """Return `family` with its alternative rules whose tensors exist."""
  endings = {name.rpartition(".layers.")[2].partition(".")[2] for name in tensors}
  block = list(family.block)
  for alternative in family.alternatives:
    if alternative.theirs in endings:
      block = [rule for rule in block if not _is_part(rule, alternative)]
      block.append(alternative)
  return dataclasses.replace(family, block=block)


def _is_part(rule: TensorRule, other: TensorRule) -> bool:
  return set(rule.paths) <= set(other.paths)
