"""Parse, check and format the value of one key.

YAML files, key=value arguments and flags all arrive as `Setting`s of raw text, so each value is
parsed in one place: `3e-4`, `010` or `yes` mean the same wherever they are written.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import get_args

import yaml

from maxlite.config.config_field import (
  ConfigField,
  KeyValue,
  Section,
  SectionClass,
  SectionT,
  entry_keys,
  is_section,
)
from maxlite.config.maxtext.answers import NO_KEYS, answer_key, answer_value, maxtext_keys
from maxlite.config.raw_values import (
  FrozenMapping,
  Raw,
  YamlValueError,
  abbreviate,
  compose_yaml,
  from_yaml,
  show,
)
from maxlite.config.schema import ENTRIES, KEYS, AxisRules, SchemaKey, flatten
from maxlite.errors import UserError

EPOCH_KEYS = ("epoch", "epochs", "num_epoch", "num_epochs", "num_train_epochs")
BASE_CONFIG = "base_config"  # the one key of YAML files that is not in the schema
SECRETS = tuple(name for name, key in KEYS.items() if key.field.secret)
_MAX_INT = 2**31 - 1  # counters are int32 on devices
_ANY_VALUE = ConfigField("")  # no choices and no range
# The number that a text begins with.
_NUMBERS: dict[object, re.Pattern[str]] = {
  int: re.compile(r"\d{1,9}(?!\d)"),
  float: re.compile(r"\d{1,20}(\.\d{0,20})?([eE][+-]?\d{1,3})?(?!\d)"),
}
# Of each type: what error messages call it, and an example.
_TYPE_DOCS: dict[object, tuple[str, str]] = {
  int: ("a whole number", "4"),
  float: ("a finite number", "0.5"),
  bool: ("true or false", "true"),
  str: ("text", "name"),
  tuple[int, ...]: ("a list of whole numbers", "[512, 1024, 1024]"),
  tuple[float, ...]: ("a list of finite numbers", "[1.0, 2.5]"),
  tuple[str, ...]: ("a list of text", "[a, b]"),
  FrozenMapping: ("a mapping {key: value}", "{key: value}"),
  tuple[FrozenMapping, ...]: ("a list of {key: value}", "[{key: value}]"),
  tuple[tuple[int, int], ...]: ("a list of [number, number]", "[[0, 8], [1000, 16]]"),
  AxisRules: ("a list of [name, [mesh axes]]", "[[embed, [fsdp]]]"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
  """One key's raw value and its source."""

  name: str
  raw: Raw
  source: str  # `FILE:LINE`, `command line` or `--key`

  def error(self, violation: str) -> UserError:
    return UserError(f"{self.source}: {show_key(self.name, self.raw)} {violation}")


def show_key(name: str, value: KeyValue) -> str:
  """`key=value` for messages: long values are abbreviated, and secrets hidden.

  Names that are like a secret's may be misspellings of it.
  """
  if difflib.get_close_matches(name, SECRETS, n=1):
    return f"{name}=(hidden)"
  return abbreviate(f"{name}={show(value)}")


def parse(
  setting: Setting, *, any_choice: bool = False, beside: Mapping[str, str] = NO_KEYS
) -> KeyValue:
  """Convert a raw value to the type of its key and check its choices and range.

  Args:
    any_choice: do not check the choices.
    beside: as for `answer_key`.

  Raises:
    UserError: the key does not exist, or the value has the wrong type or is not allowed.
  """
  known = KEYS.get(setting.name)
  takes_mapping = known is not None and known.type is FrozenMapping
  is_nested = isinstance(setting.raw, FrozenMapping) and not takes_mapping
  if is_nested and not answer_key(setting.name, ""):
    raise setting.error("is a mapping; keys are flat, write one `key: value` per line")
  key = find_key(setting, beside)
  field = key.field
  if any_choice:
    field = dataclasses.replace(field, choices=())
  return parse_as(setting, key.type, field, beside)


def parse_as(
  setting: Setting,
  kind: object,
  field: ConfigField = _ANY_VALUE,
  beside: Mapping[str, str] = NO_KEYS,
) -> KeyValue:
  """`parse` of a value that need not belong to a key: `kind` is a type of the schema."""
  try:
    value = _convert(kind, setting.raw)
  except YamlValueError as error:
    raise setting.error(str(error)) from None
  except ValueError:
    advice = answer_value(setting.name, show(setting.raw), beside)
    raise setting.error(advice or _wrong_type(setting, kind)) from None
  elements = value if isinstance(value, tuple) else (value,)
  for element in elements:
    violation = _violation(setting.name, kind, field, element)
    if violation:
      raise setting.error(answer_value(setting.name, show(setting.raw), beside) or violation)
  return value


def parse_entry(
  entry: type[SectionT], raw: FrozenMapping, source: str, **sections: Section
) -> SectionT:
  """The record of a mapping that the user wrote.

  Args:
    entry: declares the keys: `schema/entries.py` has all.
    source: where the mapping is, for error messages.
    sections: of the run, by the field of the record in which the mapping may override their keys.

  Raises:
    UserError: a key is unknown or missing, or its value is wrong.
  """
  known = entry_keys(entry)
  values: dict[str, KeyValue] = {}
  for name, value in raw.items():
    setting = Setting(name, value, source)
    if name not in known:
      raise _not_of_entry(setting, entry)
    key = known[name]
    if is_section(key.type):
      values[name] = parse_entry(key.type, parse_as(setting, FrozenMapping), source)
    else:
      values[name] = parse_as(setting, key.type, key.field)
  for name, key in known.items():
    if key.field.required and name not in raw:
      raise UserError(f"{source}: has no {name}; write {key.field.required}")
  own = {name: value for name, value in values.items() if not known[name].overrides}
  for field, section in sections.items():
    inherited = flatten(section).keys()
    changes = {}
    for name, value in values.items():
      if known[name].overrides in inherited:
        changes[known[name].overrides] = value
    own[field] = dataclasses.replace(section, **changes)
  return entry(**own)


def _not_of_entry(setting: Setting, entry: SectionClass) -> UserError:
  """The error about a key that an entry does not have."""
  name = setting.name
  [place] = [key for key, each in ENTRIES.items() if each is entry]
  known = entry_keys(entry)
  other_names = {key.overrides: each for each, key in known.items() if key.overrides not in known}
  if name in other_names:
    return setting.error(f"is not a key of {place}; did you mean {other_names[name]}?")
  if name in KEYS:
    return setting.error(f"applies to the whole run; write it once, outside of {place}")
  own = [each for each, key in known.items() if key.overrides != each]
  hint = suggest(name, known, f"choose one of {', '.join(own)}")
  return setting.error(f"is not a key of {place}; {hint}")


def find_key(setting: Setting, beside: Mapping[str, str] = NO_KEYS) -> SchemaKey:
  """The schema's entry for a setting; raise UserError if there is no such key.

  Args:
    beside: as for `answer_key`.
  """
  name = setting.name
  if name == BASE_CONFIG:
    raise setting.error(
      "belongs in a YAML file; on the command line name the file itself, before other files"
    )
  if name not in KEYS:
    otherwise = f"is not a key; {suggest(name, KEYS, '--help=all lists all keys')}"
    if name in EPOCH_KEYS:
      otherwise = f"is not a key; write {maxtext_keys().other_name['num_epoch']}"
    raise setting.error(answer_key(name, show(setting.raw), beside) or otherwise)
  return KEYS[name]


def domain(key: SchemaKey) -> str:
  """Describe the allowed values of a key: type or choices, and range."""
  field = key.field
  if field.choices:
    head = "any of" if key.type == tuple[str, ...] else "one of"
    text = f"{head} {_joined(field.choices)}"
  elif is_section(key.type):
    text, _ = _TYPE_DOCS[FrozenMapping]
  else:
    text, _ = _TYPE_DOCS[key.type]
  if field.low is not None:
    text += f" from {show(field.low)}"
  if field.high is not None:
    text += f" up to {show(field.high)}"
  return text


def _joined(values: Iterable[KeyValue]) -> str:
  return ", ".join(show(value) for value in values)


def suggest(word: str, options: Iterable[str], otherwise: str = "") -> str:
  """`did you mean OPTION?` for the closest option; if none is close, `otherwise` or a list."""
  options = list(options)
  near = difflib.get_close_matches(word, options, n=1)
  if near:
    return f"did you mean {near[0]}?"
  return otherwise or f"choose one of {', '.join(options)}"


def _wrong_type(setting: Setting, kind: object) -> str:
  """Why a value does not have the type `kind`, with an example: the number it begins with."""
  noun, example = _TYPE_DOCS[kind]
  if kind in _NUMBERS and isinstance(setting.raw, str):
    number = _NUMBERS[kind].match(setting.raw.strip())
    if number is not None:
      example = number[0]
  return f"is not {noun}; write for example {setting.name}={example}"


def _violation(name: str, kind: object, field: ConfigField, value: KeyValue) -> str:
  """Why a value (or an element of it) of the right type is not allowed; empty if it is."""
  if field.choices and value not in field.choices:
    hint = suggest(value, field.choices, "choose one of them")
    return f"is not one of {_joined(field.choices)}; {hint}"
  if field.low is not None and value < field.low:
    return f"is below {show(field.low)}; write {name}={show(field.low)} or more"
  if field.high is not None and value > field.high:
    return f"is above {show(field.high)}; write {name}={show(field.high)} or less"
  if kind is int and value > _MAX_INT:
    return f"is above {_MAX_INT}; write {name}={_MAX_INT} or less"
  return ""


def _convert(kind: object, raw: Raw) -> KeyValue:
  """`raw` as a `kind`, a type of the schema; ValueError if it is not one."""
  if get_args(kind):
    return _to_tuple(kind, raw)
  if kind is FrozenMapping:
    return _to_mapping(raw)
  if not isinstance(raw, str):
    raise ValueError(raw)
  if kind is bool:
    if raw not in ("true", "True", "false", "False"):
      raise ValueError(raw)
    return raw in ("true", "True")
  if kind is int:
    return _to_int(raw)
  if kind is float:
    return _to_float(raw)
  return raw


def _to_tuple(kind: object, raw: Raw) -> tuple[KeyValue, ...]:
  """`raw` as a `tuple[X, ...]` or a `tuple[X, Y]`."""
  kinds = get_args(kind)
  items = _split_list(raw, of_mappings=kinds[0] is FrozenMapping)
  if kinds[-1] is Ellipsis:
    kinds = kinds[:1] * len(items)
  values = tuple(_convert(element, item) for element, item in zip(kinds, items, strict=True))
  if kind == tuple[str, ...] and "" in values:
    raise ValueError(raw)
  return values


def _to_mapping(raw: Raw) -> FrozenMapping:
  if isinstance(raw, str) and raw.startswith("{"):
    raw = _parse_yaml(raw)
  if not isinstance(raw, FrozenMapping):
    raise ValueError(raw)
  return raw


def _to_float(text: str) -> float:
  value = float(text)
  if not math.isfinite(value):
    raise ValueError(text)
  return value


def _to_int(text: str) -> int:
  """The whole number of `text`, which may be written as `1e3` or `3.0`."""
  try:
    return int(text)
  except ValueError:
    value = _to_float(text)
  if not value.is_integer() or abs(value) > _MAX_INT:
    raise ValueError(text)
  return int(value)


def _split_list(raw: Raw, *, of_mappings: bool) -> tuple[Raw, ...]:
  """The items of a list from YAML, or from text: `[a, b]`, or `a,b` without brackets."""
  if isinstance(raw, tuple):
    return raw
  if isinstance(raw, FrozenMapping) or (of_mappings and raw.startswith("{")):
    raise ValueError(raw)
  if raw.startswith("[") and raw.endswith("]"):
    return _split_list(_parse_yaml(raw), of_mappings=of_mappings)
  if not raw:
    return ()
  return tuple(part.strip() for part in raw.split(","))


def _parse_yaml(text: str) -> Raw:
  try:
    return from_yaml(compose_yaml(text))
  except yaml.YAMLError as error:
    raise ValueError(text) from error
