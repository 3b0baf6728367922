"""Load and check the `Config` of a command line."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlite.config.command_line import USAGE, CommandLine, help_text
from maxlite.config.errors import UserError, exit_on_user_error, prepare_process, raise_all
from maxlite.config.members import members_of
from maxlite.config.mixture import validate_mixture
from maxlite.config.object_store import is_remote, join, store_errors, to_path
from maxlite.config.phases import initial_phases_of, validate_phase_data
from maxlite.config.plugins import import_plugins, refuse_code
from maxlite.config.python_values import MODEL_NAME, mapping_settings, sets_all_keys
from maxlite.config.schema import DEFAULTS, KEYS, Config, build
from maxlite.config.tuning import validate_tuning
from maxlite.config.validation import validate
from maxlite.config.values import Setting, parse
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

_MAPPING = "config"  # the source of settings from `load_config(config=...)`


def load_config(
  argv: Sequence[str],
  *,
  config: Any = None,
  defaults: Mapping[str, Any] = DEFAULTS,
  needs_data: bool = True,
) -> Config:
  """The checked config of `argv` (without the program's name).

  Args:
    config: a mapping or a `ml_collections.ConfigDict`, which stands for a file after those of argv.
    defaults: typed values of all keys; a run's `read_saved`, to change some of its keys.
    needs_data: whether the files of dataset_path and eval_dataset_path must exist.

  Raises:
    UserError: one line with the source, key, rule and fix.
  """
  return _resolve(CommandLine.split(argv), config, defaults, needs_data)


def main_config(
  argv: Sequence[str], program: str, *, needs_data: bool = True, usage: str = USAGE
) -> Config:
  """`load_config` for entry points: exits with 0 after `--help`, with 2 on a user error."""
  prepare_process(program)
  with exit_on_user_error(program):
    if (line := CommandLine.split(argv)).help is not None:
      sys.stdout.write(help_text(program, line.help, usage))
      raise SystemExit(0)
    return _resolve(line, None, DEFAULTS, needs_data)


def _resolve(
  line: CommandLine, config: Any, defaults: Mapping[str, Any], needs_data: bool
) -> Config:
  values = dict(defaults)
  sources: dict[str, str] = {}
  settings = _settings(line, config, defaults)
  _refuse_code_of_runs(settings)
  plugins = import_plugins(settings)
  for setting in settings:
    values[setting.name] = parse(setting) if setting.name != "plugins" else plugins
    sources[setting.name] = setting.source
  resolved: Config = build(Config, values)
  validate(resolved, sources, needs_data=needs_data)
  validate_mixture(resolved, needs_data=needs_data)
  members_of(resolved)  # raises on their mistakes
  validate_tuning(resolved)
  validate_phase_data(resolved, needs_data=needs_data)
  initial_phases_of(resolved)
  return resolved


def _refuse_code_of_runs(settings: Sequence[Setting]) -> None:
  """Raise UserError if the config.yml of a run folder, given as a file, decides what code runs."""
  last = {setting.name: setting for setting in settings}
  trust = last.get("trust_plugins")
  if trust is not None and not is_of_run(trust) and parse(trust):
    return
  decided = [s for name, s in last.items() if name in KEYS and KEYS[name].field.runs_code]
  refuse_code([setting for setting in decided if is_of_run(setting)])


def _settings(line: CommandLine, config: Any, defaults: Mapping[str, Any]) -> list[Setting]:
  """All settings of a command line and its files; later ones override earlier ones."""
  chains = [read_chain(file, "command line") for file in line.files]
  if config is not None:
    chains.append(with_bases(mapping_settings(config, _MAPPING), Path()))
  base_files = [file for chain in chains for file in chain[:-1]]
  own_files = [chain[-1] for chain in chains]
  bases = [setting for file in base_files for setting in file]
  own = [setting for file in own_files for setting in file]
  typed = [*line.assignments, *line.flags]
  _check_settings([*bases, *own, *typed])
  preset = _chosen_preset([*base_files, *own_files], typed)
  imported = _imported_model([*bases, *own, *preset, *typed], defaults)
  execution = [setting for setting in preset if setting.name in EXECUTION_KEYS]
  structure = [setting for setting in preset if setting not in execution]
  return [*execution, *bases, *own, *structure, *imported, *typed]


def _check_settings(settings: Sequence[Setting]) -> None:
  """Raise the mistakes in all settings at once, except choices that plug-ins may add."""
  has_plugins = any(setting.name == "plugins" and setting.raw for setting in settings)
  errors: list[UserError] = []
  for setting in settings:
    try:
      parse(setting, any_choice=has_plugins)
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


def _imported_model(settings: Sequence[Setting], defaults: Mapping[str, Any]) -> list[Setting]:
  """The model keys of an imported run (hf/conversion.py); empty for other runs."""
  raw = {setting.name: setting.raw for setting in settings}
  parent, name = (str(raw.get(key, defaults[key])) for key in ("base_output_directory", "run_name"))
  place = join(os.path.expanduser(parent), name, MODEL_FILE)
  if not is_remote(place):
    return read_model_file(Path(place)) if os.path.isfile(place) else []
  with store_errors(place):
    file = to_path(place)
    return read_model_file(file) if file.exists() else []
