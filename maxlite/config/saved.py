"""The resolved config of a run on disk: save, read, compare."""

from collections.abc import Collection, Mapping
from pathlib import Path

import yaml

from maxlite.config.config_field import KeyValue
from maxlite.config.plugins import import_plugins, refuse_code
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS, KEYS, SECTIONS, Config, Section, flatten
from maxlite.config.values import SECRETS, parse
from maxlite.config.yaml_files import read_file
from maxlite.storage.file_io import write_atomically
from maxlite.storage.tokenizer_files import owned_values

DEFAULT_COMMAND = Config()  # It names no plug-ins, and trusts none.
# Keys whose values a saved run does not set, since they name code, or places of this machine.
MACHINE_KEYS = tuple(
  name for name, key in KEYS.items() if key.field.of_machine or key.field.runs_code
)


def save_resolved(config: Section, path: Path) -> None:
  """Write all keys except secrets as YAML in schema order, by section, and atomically.

  The files of a tokenizer of which the folder of `path` has a copy are named relative to it.
  """
  values = public_values(config)
  values |= owned_values(values, path.parent)
  text = "# All keys of one command, resolved: a model_name is not applied again when loaded.\n"
  for title, keys in SECTIONS.items():
    text += f"\n# {title}\n"
    for key in keys:
      if key.name in values:
        text += _line(key.name, values[key.name])
  write_atomically(path, text)


def public_values(config: Section) -> dict[str, KeyValue]:
  """{key: value} of all keys that may be saved, shown and sent to trackers: all but secrets."""
  values = flatten(config)
  return {name: value for name, value in values.items() if not KEYS[name].field.secret}


def save_keys(config: Section, names: Collection[str], path: Path) -> None:
  """Write these keys of `config` as YAML, a tokenizer's files as `save_resolved` does."""
  text = "# The keys that this run's weights depend on.\n"
  values = flatten(config)
  values |= owned_values(values, path.parent)
  for name in names:
    text += _line(name, values[name])
  write_atomically(path, text)


def read_saved(path: Path, command: Config = DEFAULT_COMMAND) -> dict[str, KeyValue]:
  """Read typed values of all keys from a file of `save_resolved`, which may be a stranger's.

  A key that the file lacks has its default. The file can execute no code: MACHINE_KEYS have the
  values of `command`, and a file that names plug-ins is refused unless the command names some.
  With `trust_plugins` in the command, the file's own values of these keys are used, and its
  plug-ins are imported.

  Args:
    command: config of the command that opens the run.

  Raises:
    UserError: the file cannot be read, has an unknown key or a bad value, or names plug-ins that
      the command neither names nor trusts.
  """
  settings = read_file(path, "resolved config")
  own = flatten(command)
  if command.run.trust_plugins:
    import_plugins(settings)
    kept = ("trust_plugins", *SECRETS)
  else:
    if not command.run.plugins:
      refuse_code([setting for setting in settings if setting.name == "plugins"])
    kept = (*MACHINE_KEYS, *SECRETS)
  values = dict(DEFAULTS)
  for setting in settings:
    if setting.name not in kept:
      values[setting.name] = parse(setting)
  for name in kept:
    values[name] = own[name]
  return values


def read_values(path: Path) -> dict[str, KeyValue]:
  """Read typed values of all keys from a file of `save_resolved`, only to compare or show them.

  Names that plug-ins add are accepted as they are, since no plug-in is imported.

  Raises:
    UserError: as `read_saved`.
  """
  settings = read_file(path, "resolved config")
  values = dict(DEFAULTS)
  for setting in settings:
    values[setting.name] = parse(setting, any_choice=True)
  return values


def differences(
  values_a: Mapping[str, KeyValue], values_b: Mapping[str, KeyValue]
) -> dict[str, tuple[KeyValue, KeyValue]]:
  """{key: (value in a, value in b)} of the keys whose values differ; none of them is a secret."""
  changes = {}
  for name in DEFAULTS:
    if name not in SECRETS and values_a[name] != values_b[name]:
      changes[name] = (values_a[name], values_b[name])
  return changes


def describe_changes(config: Config) -> list[str]:
  """`key=value (default ...)` of each key that differs from its default, in schema order."""
  lines = []
  for name, (default, value) in differences(DEFAULTS, flatten(config)).items():
    lines.append(f"{name}={show(value)} (default {show(default)})")
  return lines


def _line(name: str, value: KeyValue) -> str:
  """`name: value` as a line of YAML."""
  # Escapes non-ASCII text: PyYAML's Unicode output turns some line separators into spaces.
  return yaml.safe_dump({name: value}, width=float("inf"), sort_keys=False)
