"""One key's value: read from its text, checked against its knob, shown and described.

YAML files, key=value words and flags all arrive here as text, so a value is typed in one place
and `3e-4`, `010` or `yes` mean the same wherever they are written.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import yaml

from maxlite.config.knob import ConfigError
from maxlite.config.schema import KEYS, AxisRules, Key

Raw = str | list["Raw"]
BASE_CONFIG = "base_config"  # the one key that YAML files have beyond the schema's
_LARGEST_INT = 2**31 - 1  # counters live on devices as int32


@dataclasses.dataclass(frozen=True)
class Setting:
  """What one source says of one key: the words as written, and where they stand."""

  name: str
  raw: Raw
  source: str  # `FILE:LINE`, `command line` or `--key`

  def error(self, complaint: str) -> ConfigError:
    return ConfigError(f"{self.source}: {self.name}={show(self.raw)} {complaint}")


def plain(node: yaml.Node | None) -> Raw:
  """The node's scalars as they are written, before YAML gives them types.

  Raises:
    ValueError: the node is null or holds a mapping.
  """
  if isinstance(node, yaml.SequenceNode):
    return [plain(child) for child in node.value]
  if not isinstance(node, yaml.ScalarNode):
    raise ValueError("is a mapping; keys are flat, write one `key: value` per line")
  if node.tag == "tag:yaml.org,2002:null":
    raise ValueError("has no value; write one, or remove the line to keep the default")
  return str(node.value)


def parse(setting: Setting) -> Any:
  """The typed value of `setting`, within its knob's choices and range.

  Raises:
    ConfigError: the key does not exist, or the value is not one of its type, choices or range.
  """
  key = KEYS.get(setting.name)
  if key is None:
    raise setting.error(_unknown(setting))
  try:
    value = _KINDS[key.type].read(setting.raw)
  except ValueError:
    kind = _KINDS[key.type]
    raise setting.error(
      f"is not {kind.noun}; write for example {key.name}={kind.example}"
    ) from None
  for part in value if isinstance(value, tuple) else (value,):
    complaint = _misfit(key, part)
    if complaint:
      raise setting.error(complaint)
  return value


def show(value: Any) -> str:
  """`value` (or what is written for it) as YAML and the command line spell it."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, list | tuple):
    return f"[{', '.join(map(show, value))}]"
  text = str(value)
  return text if text.isprintable() and text and " " not in text else repr(text)


def domain(key: Key) -> str:
  """What may be written for `key`, in words: its kind, choices, range and unit."""
  knob, noun = key.knob, _KINDS[key.type].noun
  if knob.choices:
    head = "any of" if key.type == tuple[str, ...] else "one of"
    noun = f"{head} {', '.join(map(show, knob.choices))}"
  unit = f" [{knob.unit}]" if knob.unit else ""
  low = "" if knob.low is None else f" from {show(knob.low)}"
  high = "" if knob.high is None else f" up to {show(knob.high)}"
  return noun + low + high + unit


def did_you_mean(word: str, options: Iterable[str]) -> str:
  """`did you mean OPTION?` for the option nearest to `word`; empty where none is near."""
  near = difflib.get_close_matches(word, list(options), n=1)
  return f"did you mean {near[0]}?" if near else ""


def _unknown(setting: Setting) -> str:
  if setting.name == BASE_CONFIG:
    return "belongs in a YAML file; on the command line name the file itself, before other files"
  return f"is no key; {did_you_mean(setting.name, KEYS) or '--help lists all keys'}"


def _misfit(key: Key, value: Any) -> str:
  """What is wrong with a value (or one element of it) of the right type; empty: nothing."""
  knob, name = key.knob, key.name
  if knob.choices and value not in knob.choices:
    known = ", ".join(map(show, knob.choices))
    return f"is not one of {known}; {did_you_mean(value, knob.choices) or 'choose one of them'}"
  if knob.low is not None and value < knob.low:
    return f"is below {show(knob.low)}; write {name}={show(knob.low)} or more"
  if knob.high is not None and value > knob.high:
    return f"is above {show(knob.high)}; write {name}={show(knob.high)} or less"
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


def _read_list(raw: Raw) -> list[Raw]:
  """A list as YAML or the command line gives it: `[a, b]`, or `a,b` without brackets."""
  if isinstance(raw, list):
    return raw
  if raw.startswith("[") and raw.endswith("]"):
    try:
      items = plain(yaml.compose(raw, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
      raise ValueError(raw) from error
    return _read_list(items)
  return [part.strip() for part in raw.split(",")] if raw else []


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
  AxisRules: _Kind(_read_axis_rules, "a list of [name, [mesh axes]]", "[[embed, [fsdp]]]"),
}
