"""The folder of a saved run; does not import JAX, so that mistakes end early."""

import dataclasses
import os
from collections.abc import Sequence

from maxlite.checkpoint.run_folder import RunFolder, step_of
from maxlite.config import Config, load_config, main_config, read_saved
from maxlite.config.command_line import CommandLine, without_files
from maxlite.config.load import check_settings
from maxlite.config.read_keys import check_typed
from maxlite.config.saved import MACHINE_KEYS
from maxlite.config.schema import flatten
from maxlite.errors import UserError, exit_on_user_error, prepare_process
from maxlite.storage.object_store import AnyPath, join, to_path

_NAMES = ("run_name", "base_output_directory", "member", "trust_plugins")


def main_run_config(argv: Sequence[str], program: str) -> Config:
  """`main_config` for entry points that read a saved run: `config_of_run`, with this process."""
  prepare_process(program)
  with exit_on_user_error(program):
    if CommandLine.split(argv).help is not None:
      main_config(argv, program)  # prints it, and exits
    named = load_config(_naming(argv), needs_data=False, names_only=True)
    return dataclasses.replace(config_of_run(argv, program), hosts=named.hosts)


def run_folder(cfg: Config) -> RunFolder:
  """The folder of the run that `cfg` names, whether it exists or not.

  Raises:
    UserError: the folder is on an object store that cannot be read.
  """
  return RunFolder(join(os.path.expanduser(cfg.run.base_output_directory), cfg.run.run_name))


def token_cache(cfg: Config) -> AnyPath:
  """The folder of tokenized data, which runs share."""
  return to_path(cfg.data.token_cache_directory or join(cfg.run.base_output_directory, ".tokens"))


def config_of_run(argv: Sequence[str], command: str = "") -> Config:
  """Return the config with which the run named in `argv` was trained, with the keys in `argv` set.

  YAML files in `argv` only name the run, since they would reset keys that it was started with, and
  set keys of this machine (`read_saved`).

  Args:
    argv: the command line.
    command: its name in `READ_KEYS`, which must read the keys in `argv`; empty: not checked.

  Raises:
    UserError: there is no such run or member, it has no checkpoint, or a key would change its
      model's shape or is not read.
  """
  named = load_config(_naming(argv), needs_data=False, names_only=True)
  folder = run_folder(named)
  name = named.run.member
  if not folder.config.exists():
    raise UserError(f"there is no run {folder.place}: train it first, or correct run_name")
  typed = without_files(argv)
  if folder.member_names() or name:
    folder = folder.member(name)
    parent, member = os.path.split(folder.place)  # the name, also where `name` is "best"
    typed += ["--member=", f"--base_output_directory={parent}", f"--run_name={member}"]
  saved = read_saved(folder.config, named)
  cfg = load_config(typed, defaults=saved, needs_data=False)
  check_saved(folder, cfg)
  if command:
    check_typed(command, CommandLine.split(argv).typed, cfg, saved)
  return cfg


def _naming(argv: Sequence[str]) -> list[str]:
  """The arguments of `argv` that name the run and this machine; others depend on the run's keys."""
  line = CommandLine.split(argv)
  check_settings(line.typed)
  named = [str(file) for file in line.files]
  for setting in line.typed:
    if setting.name in _NAMES or setting.name in MACHINE_KEYS:
      named.append(f"--{setting.name}={setting.raw}")
  return named


def check_saved(folder: RunFolder, cfg: Config) -> None:
  """Raise UserError if the run has no checkpoint, or if `cfg` has another model."""
  folder.config_changes(flatten(cfg))
  if not any(step_of(path.name) is not None for path in folder.checkpoints.glob("*")):
    raise UserError(f"there is no checkpoint in {folder.checkpoints}: train it first")
