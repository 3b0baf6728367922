"""Load and check the `Config` of a command line."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxlite.config.command_line import CommandLine
from maxlite.config.config_field import KeyValue
from maxlite.config.eval_tasks import eval_tasks_of
from maxlite.config.help_text import USAGE, help_text
from maxlite.config.ladder import check_ladder
from maxlite.config.maxtext.answers import answer_key
from maxlite.config.members import members_of
from maxlite.config.mixture import check_mixture
from maxlite.config.phases import check_phase_data, initial_phases_of
from maxlite.config.plugins import import_plugins, refuse_code
from maxlite.config.python_values import MODEL_NAME, mapping_settings, sets_all_keys
from maxlite.config.raw_values import show
from maxlite.config.read_keys import check_typed
from maxlite.config.rules import check_rules
from maxlite.config.schema import DEFAULTS, KEYS, Config, build
from maxlite.config.start_model import START_KEYS, start_settings, with_start
from maxlite.config.tuning import check_tuning
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
  settings = read_settings(line, config, defaults, names_only=names_only)
  _refuse_code_of_runs(settings)
  plugins = import_plugins(settings)

  values = dict(defaults)
  sources: dict[str, str] = {}  # of the keys that are not at their defaults, for error messages
  for setting in settings:
    values[setting.name] = plugins if setting.name == "plugins" else parse(setting)
    sources[setting.name] = setting.source
  resolved: Config = build(Config, with_start(values))

  validate(resolved, sources, needs_data=needs_data)
  if command:
    check_typed(command, line.typed, resolved)
  return resolved


def validate(config: Config, sources: Mapping[str, str], *, needs_data: bool) -> None:
  """Check everything that can be checked in a config without devices.

  Args:
    sources: where each key that is not at its default was set, for error messages.
    needs_data: whether the files of dataset_path and eval_dataset_path must exist.

  Raises:
    UserError: the first mistake: one line with the keys, their values and sources, the rule and the
      fix.
  """
  check_rules(config, sources, needs_data=needs_data)
  check_mixture(config, needs_data=needs_data)
  members_of(config)  # raises on their mistakes, as the functions below
  check_tuning(config)
  check_ladder(config)
  eval_tasks_of(config)
  check_phase_data(config, needs_data=needs_data)
  initial_phases_of(config)


def read_settings(
  line: CommandLine,
  config: object,
  defaults: Mapping[str, KeyValue],
  *,
  names_only: bool = False,
) -> list[Setting]:
  """All settings of a command, the weakest first: each overrides those before it.

  Args: see `load_config`.

  Raises:
    UserError: a file cannot be read, or a setting is wrong; all wrong settings at once.
  """
  chains = [read_chain(file, "command line") for file in line.files]
  if config is not None:
    chains.append(with_bases(mapping_settings(config, "config"), Path()))
  files = [file for chain in chains for file in chain[:-1]]  # bases, then the files themselves
  files += [chain[-1] for chain in chains]
  written = [setting for file in files for setting in file]
  check_settings([*written, *line.typed])

  preset = _chosen_preset(files, line.typed)
  structure = [setting for setting in preset if setting.name not in EXECUTION_KEYS]
  settings = [setting for setting in preset if setting.name in EXECUTION_KEYS]
  settings += [*written, *structure]
  if not names_only:
    # The model to start from, and the model of an imported run that the command goes on with.
    # If only the defaults, a resolved config, name the first, they have its keys already.
    if any(setting.name in START_KEYS for setting in [*written, *line.typed]):
      settings += start_settings([*written, *line.typed], defaults)
    settings += _imported_model([*written, *preset, *line.typed], defaults)
  return [*settings, *line.typed]


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
