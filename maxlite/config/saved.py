"""The resolved config of a run on disk: written, read back, compared."""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from maxlite.config.files import read_file
from maxlite.config.frozen_mapping import FrozenMapping, Raw
from maxlite.config.schema import DEFAULTS, KEYS, RENAMED_KEYS, Config, Key, flatten
from maxlite.config.values import Setting, parse, show

_HEADER = "# Every key of one command, resolved. On a command line, model_name would apply again.\n"


def save_resolved(config: Config, path: Path) -> None:
  """Writes all keys as YAML in the schema's order, by section; the file is never half written."""
  values = flatten(config)
  text = _HEADER
  for section, keys in itertools.groupby(KEYS.values(), _section):
    text += f"\n# {section}\n" + "".join(_line(key.name, values[key.name]) for key in keys)
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(f".{path.name}.{os.getpid()}")
  unfinished.write_text(text, encoding="utf-8")
  unfinished.replace(path)


def save_keys(values: Mapping[str, Any], path: Path) -> None:
  """Writes these keys as YAML."""
  lines = "".join(_line(name, value) for name, value in values.items())
  path.write_text(f"# What this run's weights were made with.\n{lines}", encoding="utf-8")


def read_saved(path: Path) -> dict[str, Any]:
  """Typed values of all keys from a file of `save_resolved`.

  A key that the file lacks has its default; old names of renamed keys are accepted.

  Raises:
    UserError: the file cannot be read, or holds what the schema does not know.
  """
  settings = map(_with_current_names, read_file(path, "resolved config"))
  return DEFAULTS | {setting.name: parse(setting) for setting in settings}


def differences(
  values_a: Mapping[str, Any], values_b: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """{key: (value in a, value in b)} where two sets of all keys' values differ, in schema order."""
  pairs = {name: (values_a[name], values_b[name]) for name in KEYS}
  return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def describe_changes(config: Config) -> list[str]:
  """One `key=value (default ...)` per key that is not at its default, in schema order."""
  changed = differences(DEFAULTS, flatten(config))
  return [f"{name}={show(b)} (default {show(a)})" for name, (a, b) in changed.items()]


def _with_current_names(setting: Setting) -> Setting:
  raw = setting.raw
  if setting.name in ("members", "sweep"):
    raw = _rename_keys(raw)
  return Setting(RENAMED_KEYS.get(setting.name, setting.name), raw, setting.source)


def _rename_keys(raw: Raw) -> Raw:
  """`raw` with the current names of renamed keys in all its mappings."""
  if isinstance(raw, tuple):
    return tuple(map(_rename_keys, raw))
  if isinstance(raw, FrozenMapping):
    entries = ((RENAMED_KEYS.get(key, key), _rename_keys(part)) for key, part in raw.items())
    return FrozenMapping(entries, raw.source)
  return raw


def _section(key: Key) -> str:
  return key.section.__name__.removesuffix("Config").lower()


def _line(name: str, value: Any) -> str:
  # All but ASCII is escaped: PyYAML's Unicode output turns some line separators into spaces.
  return yaml.safe_dump({name: _builtin(value)}, width=float("inf"), sort_keys=False)


def _builtin(value: Any) -> Any:
  """`value` with lists and dicts in place of the schema's own types."""
  if isinstance(value, FrozenMapping):
    return {key: _builtin(part) for key, part in value.items()}
  return [_builtin(part) for part in value] if isinstance(value, tuple) else value
