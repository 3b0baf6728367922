"""From a command line to a checked `Config`; the edge where a user's mistake ends the program."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from maxlite.config.command_line import Words, help_text, split
from maxlite.config.errors import exit_on_user_error
from maxlite.config.files import MODEL_FILE, read_chain, read_file, read_preset
from maxlite.config.members import members_of
from maxlite.config.phase_data import check_phase_data
from maxlite.config.phases import warmup_of
from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.config.validate import validate
from maxlite.config.values import Setting, parse


def load_config(
  argv: Sequence[str], *, defaults: Mapping[str, Any] = DEFAULTS, needs_data: bool = True
) -> Config:
  """The config of `argv` (without the program's name), checked.

  Args:
    defaults: typed values of all keys to start from; a run's `read_saved`, to change some of them.
    needs_data: whether the files of dataset_path and eval_dataset_path must exist.

  Raises:
    UserError: something is wrong; one line with its source, key, rule and fix.
  """
  return _resolve(split(argv), defaults, needs_data)


def main_config(
  argv: Sequence[str],
  program: str,
  *,
  defaults: Mapping[str, Any] = DEFAULTS,
  needs_data: bool = True,
) -> Config:
  """`load_config` for entry points: `--help` prints and exits 0, a mistake exits 2 in one line."""
  with exit_on_user_error(program):
    words = split(argv)
    if words.asks_help:
      sys.stdout.write(help_text(program))
      raise SystemExit(0)
    return _resolve(words, defaults, needs_data)


def _resolve(words: Words, defaults: Mapping[str, Any], needs_data: bool) -> Config:
  values = ConfigDict(dict(defaults)).lock()
  source: dict[str, str] = {}
  for setting in _in_order(words, defaults):
    values[setting.name] = parse(setting)
    source[setting.name] = setting.source
  config: Config = build(Config, dict(values.items()))
  validate(config, source, needs_data=needs_data)
  members_of(config)  # their mistakes are told here too
  check_phase_data(config, needs_data=needs_data)
  warmup_of(config)
  return config


def _in_order(words: Words, defaults: Mapping[str, Any]) -> list[Setting]:
  """All settings of a command line and its files, those that count least first."""
  chains = [read_chain(Path(file), "command line") for file in words.files]
  bases = [setting for chain in chains for base in chain[:-1] for setting in base]
  own = [setting for chain in chains for setting in chain[-1]]
  typed = [*words.assignments, *words.flags]
  chosen = [s for s in (*bases, *own, *typed) if s.name == "model_name"]
  preset = read_preset(chosen[-1]) if chosen and chosen[-1].raw else []
  told = [*bases, *own, *preset, *typed]
  return [*bases, *own, *preset, *_model_of_run(told, defaults), *typed]


def _model_of_run(told: Sequence[Setting], defaults: Mapping[str, Any]) -> list[Setting]:
  """The keys that an imported run has its model by (hf/conversion.py); of others, none."""
  said = {setting.name: setting.raw for setting in told}
  output, name = (
    str(said.get(key, defaults[key])) for key in ("base_output_directory", "run_name")
  )
  file = Path(output).expanduser() / name / MODEL_FILE
  return read_file(file, "run folder") if file.is_file() else []
