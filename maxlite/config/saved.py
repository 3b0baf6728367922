"""The resolved config of a run on disk: save, read, compare."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from maxlite.config.file_io import write_atomically
from maxlite.config.plugins import import_plugins
from maxlite.config.raw_values import FrozenMapping, Raw, show
from maxlite.config.schema import DEFAULTS, REMOVED_KEYS, RENAMED_KEYS, SECTIONS, Config, flatten
from maxlite.config.values import Setting, parse
from maxlite.config.yaml_files import read_file


def save_resolved(config: Config, path: Path) -> None:
  """Write all keys as YAML in schema order, by section; the file is replaced atomically."""
  values = flatten(config)
  text = "# All keys of one command, resolved. A model_name would be applied again when loaded.\n"
  for title, keys in SECTIONS.items():
    text += f"\n# {title}\n" + "".join(_line(key.name, values[key.name]) for key in keys)
  write_atomically(path, text)


def save_keys(values: Mapping[str, Any], path: Path) -> None:
  """Write these keys as YAML."""
  lines = "".join(_line(name, value) for name, value in values.items())
  path.write_text(f"# The keys that this run's weights depend on.\n{lines}", encoding="utf-8")


def read_saved(path: Path) -> dict[str, Any]:
  """Read typed values of all keys from a file of `save_resolved`.

  A key that the file lacks has its default; old names of renamed keys are accepted.

  Raises:
    UserError: the file cannot be read, has an unknown key or a bad value, or names a plug-in that
      cannot be imported.
  """
  saved = read_file(path, "resolved config")
  kept = (setting for setting in saved if REMOVED_KEYS.get(setting.name) != setting.raw)
  settings = list(map(_with_current_names, kept))
  import_plugins(settings)
  return DEFAULTS | {setting.name: parse(setting) for setting in settings}


def differences(
  values_a: Mapping[str, Any], values_b: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
  """{key: (value in a, value in b)} of the keys whose values differ, in schema order."""
  pairs = {name: (values_a[name], values_b[name]) for name in DEFAULTS}
  return {name: (a, b) for name, (a, b) in pairs.items() if a != b}


def describe_changes(config: Config) -> list[str]:
  """`key=value (default ...)` of each key that differs from its default, in schema order."""
  changed = differences(DEFAULTS, flatten(config))
  return [f"{name}={show(value)} (default {show(old)})" for name, (old, value) in changed.items()]


def _with_current_names(setting: Setting) -> Setting:
  in_members = setting.name in ("members", "sweep", "search")
  raw = _rename_keys(setting.raw) if in_members else setting.raw
  return Setting(RENAMED_KEYS.get(setting.name, setting.name), raw, setting.source)


def _rename_keys(raw: Raw) -> Raw:
  """`raw` with renamed keys renamed and removed keys dropped in all its mappings."""
  if isinstance(raw, tuple):
    return tuple(map(_rename_keys, raw))
  if isinstance(raw, FrozenMapping):
    kept = ((key, part) for key, part in raw.items() if REMOVED_KEYS.get(key) != part)
    entries = ((RENAMED_KEYS.get(key, key), _rename_keys(part)) for key, part in kept)
    return FrozenMapping(entries, raw.source)
  return raw


def _line(name: str, value: Any) -> str:
  # Escapes non-ASCII text: PyYAML's Unicode output turns some line separators into spaces.
  return yaml.safe_dump({name: value}, width=float("inf"), sort_keys=False)
