"""The folders of saved runs and models; does not import JAX, so that mistakes end early."""

import dataclasses
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from maxlite.checkpoint.run_folder import RunFolder, step_of
from maxlite.config import (
  Config,
  exit_on_user_error,
  load_config,
  main_config,
  read_saved,
  read_values,
)
from maxlite.config.command_line import without_files
from maxlite.config.errors import UserError
from maxlite.config.file_io import read_json_object
from maxlite.config.object_store import AnyPath, join, to_path
from maxlite.config.phases import phases_of
from maxlite.config.registry import TAUGHT_LOSSES
from maxlite.config.schema import flatten
from maxlite.config.values import suggest


def main_run_config(argv: Sequence[str], program: str) -> Config:
  """`main_config` for entry points that read a saved run: `config_of_run`, with this process."""
  cfg = main_config(argv, program, needs_data=False)
  with exit_on_user_error(program):
    return dataclasses.replace(config_of_run(argv), hosts=cfg.hosts)


def run_folder(cfg: Config) -> RunFolder:
  """Raise UserError if the folder is on an object store that cannot be read."""
  return RunFolder(join(os.path.expanduser(cfg.run.base_output_directory), cfg.run.run_name))


def token_cache(cfg: Config) -> AnyPath:
  return to_path(cfg.data.token_cache_directory or join(cfg.run.base_output_directory, ".tokens"))


def config_of_run(argv: Sequence[str]) -> Config:
  """Return the config with which the run named in `argv` was trained, with the keys in `argv` set.

  YAML files in `argv` only name the run, since they would reset keys that it was started with, and
  set keys of this machine (`read_saved`).

  Raises:
    UserError: there is no such run or member, it has no checkpoint, or a key would change its
      model's shape.
  """
  named = load_config(argv, needs_data=False)
  folder, name = run_folder(named), named.run.member
  if not folder.config.exists():
    raise UserError(f"there is no run {folder.place}: train it first, or correct run_name")
  typed = without_files(argv)
  if folder.member_names() or name:
    folder = folder.member(name)
    parent, member = os.path.split(folder.place)  # the name, also where `name` is "best"
    typed += ["--member=", f"--base_output_directory={parent}", f"--run_name={member}"]
  cfg = load_config(typed, defaults=read_saved(folder.config, named), needs_data=False)
  check_saved(folder, cfg)
  return cfg


def check_saved(folder: RunFolder, cfg: Config) -> None:
  """Raise UserError if the run has no checkpoint, or if `cfg` has another model."""
  folder.config_changes(flatten(cfg))
  if not any(step_of(path.name) is not None for path in folder.checkpoints.glob("*")):
    raise UserError(f"there is no checkpoint in {folder.checkpoints}: train it first")


class ModelFolder(NamedTuple):
  """A folder, and the name of its format in WEIGHT_FORMATS."""

  path: Path
  format: str

  @property
  def vocab_size(self) -> int | None:
    if self.format == "run":
      return int(read_values(self.path / "config.yml")["vocab_size"])
    return read_json_object(self.path / "config.json", "copy it again").get("vocab_size")


def model_folders(key: str, path: str, members: Collection[str] = ()) -> list[ModelFolder]:
  """The folder at `path`, if any, or those of the members of an ensemble, or of these `members`.

  Args:
    key: of the config, for messages.

  Raises:
    UserError: the folder is of no known format, or has no such members.
  """
  if not path:
    return []
  folder = Path(os.path.expanduser(path))
  run = RunFolder(folder)
  names = run.member_names() if run.config.is_file() else []
  if unknown := sorted(set(members) - set(names)):
    hint = suggest(unknown[0], names) if names else "it is not an ensemble; write no members"
    raise UserError(f"{key}={path} has no member {unknown[0]}: {hint}")
  if names:
    chosen = [name for name in names if name in members or not members]
    return [ModelFolder(run.member(name).directory, "run") for name in chosen]
  if run.config.is_file():
    return [ModelFolder(folder, "run")]
  if (folder / "config.json").is_file():
    return [ModelFolder(folder, "huggingface")]
  raise UserError(f"{key}={path} is not a run folder (config.yml) and has no config.json")


def teacher_folders(cfg: Config) -> list[ModelFolder]:
  """The models of the teacher, whose predictions are averaged; empty if no loss reads them.

  Raises:
    UserError: there is no such folder or member, or a model has another vocabulary.
  """
  losses = [phase.loss for phase in phases_of(cfg)] or [cfg.training.loss_type]
  if not any(loss in TAUGHT_LOSSES for loss in losses):
    return []
  keys, vocab_size = cfg.training, cfg.model.vocab_size
  folders = model_folders("teacher_path", keys.teacher_path, keys.teacher_members)
  for folder in folders:
    if folder.vocab_size != vocab_size:
      raise UserError(
        f"the teacher {folder.path} has vocab_size={folder.vocab_size}, the student {vocab_size}: "
        "a student needs the vocabulary of its teacher; write the same tokenizer and vocab_size"
      )
  return folders


def check_model_folders(cfg: Config) -> None:
  """Check the folders whose parameters the run reads.

  Raises:
    UserError: a folder is missing, of another model, or needs plug-ins that `cfg` does not name.
  """
  parents = model_folders("load_parameters_path", cfg.checkpoint.load_parameters_path)
  for folder in (*teacher_folders(cfg), *parents):
    if folder.format == "run":
      read_saved(folder.path / "config.yml", cfg)
