"""Load and check the `Config` of a command line."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from maxlite.config.command_line import CommandLine
from maxlite.config.config_field import KeyValue
from maxlite.config.help_text import USAGE, help_text
from maxlite.config.maxtext.answers import answer_key
from maxlite.config.plugins import import_plugins, refuse_code
from maxlite.config.python_values import MODEL_NAME, mapping_settings, sets_all_keys
from maxlite.config.raw_values import show
from maxlite.config.read_keys import check_typed
from maxlite.config.schema import DEFAULTS, KEYS, Config, build
from maxlite.config.start_model import start_settings, with_start
from maxlite.config.validation import validate
from maxlite.config.values import BASE_CONFIG, Setting, parse
from maxlite.config.yaml_files import (
  EXECUTION_KEYS,
  MODEL_FILE,
  find_preset,
  is_of_run,
  read_chain,
  read_model_file,
  read_preset,
  with_bases,
)
from maxlite.errors import UserError, exit_on_user_error, prepare_process, raise_all
from maxlite.storage.object_store import is_remote, join, store_errors, to_path

_MAX_SUGGESTIONS = 50  # a search for a similar key takes a millisecond
# The layers that are read in folders of models.
_START = "start model"
_IMPORT = "imported model"
_OF_FOLDERS = (_START, _IMPORT)
_MAPPING = "config"  # the source of settings from `load_config(config=...)`


class Layer(NamedTuple):
  """Settings of one kind of source, in the order of writing."""

  name: str
  settings: Sequence[Setting]


class _Files(NamedTuple):
  """The settings of the files of a command, a list per file, from left to right."""

  bases: list[list[Setting]]  # files of the base_config chains
  own: list[list[Setting]]  # files that the command names, and the mapping of `load_config`


def load_config(
  argv: Sequence[str],
  *,
  config: object = None,
  defaults: Mapping[str, KeyValue] = DEFAULTS,
  needs_data: bool = True,
  command: str = "",
  names_only: bool = False,
) -> Config:
  """The checked config of `argv` (without the program's name).

  Args:
    config: a mapping or a `ml_collections.ConfigDict`, which stands for a file after those of argv.
    defaults: typed values of all keys; a run's `read_saved`, to change some of its keys.
    needs_data: whether the files of data and of the tokenizer must exist.
    command: the one that must read all typed keys (`READ_KEYS`); empty: they are not checked.
    names_only: whether the config only names a run, whose model is not read.

  Raises:
    UserError: one line with the source, key, rule and fix.
  """
  line = CommandLine.split(argv)
  resolved = _resolve(line, config, defaults, needs_data, names_only)
  if command:
    check_typed(command, line.typed, resolved)
  return resolved


def main_config(
  argv: Sequence[str],
  program: str,
  *,
  needs_data: bool = True,
  usage: str = USAGE,
  command: str = "",
) -> Config:
  """`load_config` for entry points: exits with 0 after `--help`, with 2 on a user error."""
  prepare_process(program)
  with exit_on_user_error(program):
    line = CommandLine.split(argv)
    if line.help is not None:
      sys.stdout.write(help_text(program, line.help, usage))
      raise SystemExit(0)
    return load_config(argv, needs_data=needs_data, command=command)


def _resolve(
  line: CommandLine,
  config: object,
  defaults: Mapping[str, KeyValue],
  needs_data: bool,
  names_only: bool,
) -> Config:
  settings: list[Setting] = []
  for layer in read_layers(line, config, defaults):
    if names_only and layer.name in _OF_FOLDERS:
      continue
    settings.extend(layer.settings)
  _refuse_code_of_runs(settings)
  plugins = import_plugins(settings)
  values = dict(defaults)
  sources: dict[str, str] = {}
  for setting in settings:
    if setting.name == "plugins":
      values[setting.name] = plugins
    else:
      values[setting.name] = parse(setting)
    sources[setting.name] = setting.source
  resolved: Config = build(Config, with_start(values))
  validate(resolved, sources, needs_data=needs_data)
  return resolved


def read_layers(line: CommandLine, config: object, defaults: Mapping[str, KeyValue]) -> list[Layer]:
  """The layers over the defaults, from the weakest: each overrides those before it.

  Args:
    config: see `load_config`.
    defaults: typed values of all keys.

  Raises:
    UserError: a file cannot be read, or a setting is wrong; all wrong settings at once.
  """
  files = _read_files(line, config)
  bases = _joined(files.bases)
  own = _joined(files.own)
  typed = line.typed
  check_settings([*bases, *own, *typed])
  preset = _chosen_preset([*files.bases, *files.own], typed)
  execution = [setting for setting in preset if setting.name in EXECUTION_KEYS]
  structure = [setting for setting in preset if setting.name not in EXECUTION_KEYS]
  start = start_settings([*bases, *own, *typed], defaults)
  imported = _imported_model([*bases, *own, *preset, *typed], defaults)
  return [
    Layer("how the preset is computed", execution),
    Layer("base_config", bases),
    Layer("file", own),
    Layer("preset", structure),
    Layer(_START, start),
    Layer(_IMPORT, imported),
    Layer("key=value", line.assignments),
    Layer("--key=value", line.flags),
  ]


def _read_files(line: CommandLine, config: object) -> _Files:
  """Read the files of a command line, and the mapping `config` if it is not None."""
  chains = []
  for file in line.files:
    chains.append(read_chain(file, "command line"))
  if config is not None:
    chains.append(with_bases(mapping_settings(config, _MAPPING), Path()))
  files = _Files([], [])
  for chain in chains:
    files.bases.extend(chain[:-1])
    files.own.append(chain[-1])
  return files


def _joined(files: Sequence[Sequence[Setting]]) -> list[Setting]:
  settings: list[Setting] = []
  for file in files:
    settings.extend(file)
  return settings


def _refuse_code_of_runs(settings: Sequence[Setting]) -> None:
  """Raise UserError if the config.yml of a run folder, given as a file, decides what code runs."""
  last = {setting.name: setting for setting in settings}
  trust = last.get("trust_plugins")
  if trust is not None and not is_of_run(trust) and parse(trust):
    return
  refused = []
  for name, setting in last.items():
    if name in KEYS and KEYS[name].field.runs_code and is_of_run(setting):
      refused.append(setting)
  refuse_code(refused)


def check_settings(settings: Sequence[Setting]) -> None:
  """Raise the mistakes in all settings at once, except choices that plug-ins may add."""
  has_plugins = any(setting.name == "plugins" and setting.raw for setting in settings)
  beside = {setting.name: show(setting.raw) for setting in settings}
  errors: list[UserError] = []
  for setting in settings:
    try:
      if len(errors) >= _MAX_SUGGESTIONS and setting.name not in (*KEYS, BASE_CONFIG):
        advice = answer_key(setting.name, show(setting.raw), beside) or "is not a key"
        raise setting.error(advice)
      parse(setting, any_choice=has_plugins, beside=beside)
      if setting.name == "model_name" and setting.raw:
        find_preset(setting)
    except UserError as error:
      errors.append(error)
  raise_all(errors)


def _chosen_preset(files: Sequence[list[Setting]], typed: Sequence[Setting]) -> list[Setting]:
  """The preset that the last `model_name` selects; empty if that of a resolved config is the last.

  A file with all keys, such as the saved config of a run, is the result of its `model_name`.
  """
  chosen: Setting | None = None
  for file in files:
    is_resolved = sets_all_keys(file)
    for setting in file:
      if setting.name == MODEL_NAME:
        chosen = None if is_resolved else setting
  for setting in typed:
    if setting.name == MODEL_NAME:
      chosen = setting
  if chosen is None or not chosen.raw:
    return []
  return read_preset(chosen)


def _imported_model(settings: Sequence[Setting], defaults: Mapping[str, KeyValue]) -> list[Setting]:
  """The model keys of an imported run (hf/conversion.py); empty for other runs."""
  parent = defaults["base_output_directory"]
  name = defaults["run_name"]
  for setting in settings:
    if setting.name == "base_output_directory":
      parent = setting.raw
    elif setting.name == "run_name":
      name = setting.raw
  place = join(os.path.expanduser(str(parent)), str(name), MODEL_FILE)
  if not is_remote(place):
    if not os.path.lexists(place):
      return []
    return read_model_file(Path(place))
  with store_errors(place):
    file = to_path(place)
    if not file.exists():
      return []
    return read_model_file(file)
