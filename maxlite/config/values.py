"""One key's value: read from its text, checked against its knob, shown and described.

YAML files, key=value words and flags all arrive here as text, so a value is typed in one place
and `3e-4`, `010` or `yes` mean the same wherever they are written.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import yaml

from maxlite.config.errors import UserError
from maxlite.config.frozen_mapping import FrozenMapping, Raw
from maxlite.config.schema import KEYS, RENAMED_KEYS, AxisRules, Key

BASE_CONFIG = "base_config"  # the one key that YAML files have beyond the schema's
_BARE = re.compile(r"-?[\w./][\w./+*-]*")  # a word that needs no quotes within [] and {}
_LARGEST_INT = 2**31 - 1  # counters live on devices as int32


@dataclasses.dataclass(frozen=True)
class Setting:
  """What one source says of one key: the words as written, and where they stand."""

  name: str
  raw: Raw
  source: str  # `FILE:LINE`, `command line` or `--key`

  def error(self, complaint: str) -> UserError:
    return UserError(f"{self.source}: {self.name}={show(self.raw)} {complaint}")


class NotPlainError(UserError):
  """YAML that says nothing, or two things, where a value should stand; the text tells the fix."""


def plain(node: yaml.Node | None, file: str = "") -> Raw:
  """The node's scalars as they are written, before YAML gives them types.

  Args:
    file: where the node stands, for the `source` of its mappings; empty: in no file.

  Raises:
    NotPlainError: a scalar is null, or a mapping has a key twice or one that is no text.
  """
  if isinstance(node, yaml.SequenceNode):
    return tuple(plain(child, file) for child in node.value)
  if isinstance(node, yaml.MappingNode):
    return _plain_table(node, file)
  if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
    raise NotPlainError("has no value; write one, or remove the line to keep the default")
  return str(node.value)


def _plain_table(node: yaml.MappingNode, file: str) -> FrozenMapping:
  entries: dict[str, Raw] = {}
  for key_node, value_node in node.value:
    key = plain(key_node)
    if not isinstance(key, str):
      raise NotPlainError(f"has {show(key)} for a key; write `key: value`")
    if key in entries:
      raise NotPlainError(f"has {key} twice in one mapping; remove one of the two")
    try:
      entries[key] = plain(value_node, file)
    except NotPlainError as error:
      raise NotPlainError(f"has a mapping whose {key} {error}") from None
  return FrozenMapping(entries.items(), f"{file}:{node.start_mark.line + 1}" if file else "")


def parse(setting: Setting) -> Any:
  """The typed value of `setting`, within its knob's choices and range.

  Raises:
    UserError: the key does not exist, or the value is not one of its type, choices or range.
  """
  known = KEYS.get(setting.name)
  if isinstance(setting.raw, FrozenMapping) and (known is None or known.type is not FrozenMapping):
    raise setting.error("is a mapping; keys are flat, write one `key: value` per line")
  key = find_key(setting)
  kind = _KINDS[key.type]
  try:
    value = kind.read(setting.raw)
  except NotPlainError as error:
    raise setting.error(str(error)) from None
  except ValueError:
    raise setting.error(
      f"is not {kind.noun}; write for example {key.name}={kind.example}"
    ) from None
  for part in value if isinstance(value, tuple) else (value,):
    complaint = _misfit(key, part)
    if complaint:
      raise setting.error(complaint)
  return value


def find_key(setting: Setting) -> Key:
  """The schema's key that `setting` is of.

  Raises:
    UserError: it does not exist.
  """
  if setting.name == BASE_CONFIG:
    hint = "belongs in a YAML file; on the command line name the file itself, before other files"
    raise setting.error(hint)
  if setting.name in RENAMED_KEYS:
    new = RENAMED_KEYS[setting.name]
    raise setting.error(f"was renamed; write {new}={show(setting.raw)}")
  if setting.name not in KEYS:
    raise setting.error(f"is no key; {did_you_mean(setting.name, KEYS) or '--help lists all keys'}")
  return KEYS[setting.name]


def show(value: Any) -> str:
  """`value` (or what is written for it) as YAML and the command line spell it."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    return f"[{', '.join(map(_show_part, value))}]"
  if isinstance(value, FrozenMapping):
    parts = (f"{_show_part(key)}: {_show_part(part)}" for key, part in value.items())
    return "{" + ", ".join(parts) + "}"
  text = str(value)
  return text if text.isprintable() and text and " " not in text else repr(text)


def _show_part(value: Any) -> str:
  """`show` of a part of a list or mapping, where some words would mean something else to YAML."""
  if not isinstance(value, str) or (_BARE.fullmatch(value) and value.lower() != "null"):
    return show(value)
  return str(yaml.safe_dump(value, default_style='"', width=float("inf"))).rstrip("\n")


def domain(key: Key) -> str:
  """What may be written for `key`, in words: its kind, choices, range and unit."""
  field, noun = key.field, _KINDS[key.type].noun
  if field.choices:
    head = "any of" if key.type == tuple[str, ...] else "one of"
    noun = f"{head} {', '.join(map(show, field.choices))}"
  unit = f" [{field.unit}]" if field.unit else ""
  low = "" if field.low is None else f" from {show(field.low)}"
  high = "" if field.high is None else f" up to {show(field.high)}"
  return noun + low + high + unit


def did_you_mean(word: str, options: Iterable[str]) -> str:
  """`did you mean OPTION?` for the option nearest to `word`; empty where none is near."""
  near = difflib.get_close_matches(word, list(options), n=1)
  return f"did you mean {near[0]}?" if near else ""


def _misfit(key: Key, value: Any) -> str:
  """What is wrong with a value (or one element of it) of the right type; empty: nothing."""
  field, name = key.field, key.name
  if field.choices and value not in field.choices:
    known = ", ".join(map(show, field.choices))
    return f"is not one of {known}; {did_you_mean(value, field.choices) or 'choose one of them'}"
  if field.low is not None and value < field.low:
    return f"is below {show(field.low)}; write {name}={show(field.low)} or more"
  if field.high is not None and value > field.high:
    return f"is above {show(field.high)}; write {name}={show(field.high)} or less"
  if key.type is int and value > _LARGEST_INT:
    return f"is above {_LARGEST_INT}; write {name}={_LARGEST_INT} or less"
  return ""


def _read_int(raw: Raw) -> int:
  return int(_read_str(raw))


def _read_float(raw: Raw) -> float:
  value = float(_read_str(raw))
  if not math.isfinite(value):
    raise ValueError(raw)
  return value


def _read_bool(raw: Raw) -> bool:
  if raw not in ("true", "True", "false", "False"):
    raise ValueError(raw)
  return raw in ("true", "True")


def _read_str(raw: Raw) -> str:
  if not isinstance(raw, str):
    raise ValueError(raw)
  return raw


def _read_list(raw: Raw) -> tuple[Raw, ...]:
  """A list as YAML or the command line gives it: `[a, b]`, or `a,b` without brackets."""
  if isinstance(raw, tuple):
    return raw
  if isinstance(raw, FrozenMapping):
    raise ValueError(raw)
  if raw.startswith("[") and raw.endswith("]"):
    return _read_list(_read_yaml(raw))
  return tuple(part.strip() for part in raw.split(",")) if raw else ()


def _read_yaml(text: str) -> Raw:
  try:
    return plain(yaml.compose(text, Loader=yaml.SafeLoader))
  except yaml.YAMLError as error:
    raise ValueError(text) from error


def _read_table(raw: Raw) -> FrozenMapping:
  table = _read_yaml(raw) if isinstance(raw, str) and raw.startswith("{") else raw
  if not isinstance(table, FrozenMapping):
    raise ValueError(raw)
  return table


def _read_tables(raw: Raw) -> tuple[FrozenMapping, ...]:
  if isinstance(raw, str) and raw.startswith("{"):
    raise ValueError(raw)
  return tuple(_read_table(item) for item in _read_list(raw))


def _read_strings(raw: Raw) -> tuple[str, ...]:
  strings = tuple(_read_str(item) for item in _read_list(raw))
  if "" in strings:
    raise ValueError(raw)
  return strings


def _read_ints(raw: Raw) -> tuple[int, ...]:
  return tuple(_read_int(item) for item in _read_list(raw))


def _read_axis_rules(raw: Raw) -> AxisRules:
  rows = (_read_list(row) for row in _read_list(raw))
  return tuple((_read_str(name), _read_strings(mesh_axes)) for name, mesh_axes in rows)


class _Kind(NamedTuple):
  """A type of the schema: its reader (ValueError: not of this type), its name, an example."""

  read: Callable[[Raw], Any]
  noun: str
  example: str


_KINDS: dict[Any, _Kind] = {
  int: _Kind(_read_int, "a whole number", "4"),
  float: _Kind(_read_float, "a finite number", "0.5"),
  bool: _Kind(_read_bool, "true or false", "true"),
  str: _Kind(_read_str, "text", "name"),
  tuple[int, ...]: _Kind(_read_ints, "a list of whole numbers", "[512, 1024, 1024]"),
  tuple[str, ...]: _Kind(_read_strings, "a list of texts", "[a, b]"),
  FrozenMapping: _Kind(_read_table, "a mapping {key: value}", "{key: value}"),
  tuple[FrozenMapping, ...]: _Kind(_read_tables, "a list of {key: value}", "[{key: value}]"),
  AxisRules: _Kind(_read_axis_rules, "a list of [name, [mesh axes]]", "[[embed, [fsdp]]]"),
}
