"""Folders whose models a run reads; does not import JAX, so that mistakes end early."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, read_saved, read_values
from maxlite.config.mixture import mixture_of
from maxlite.config.phases import phases_of
from maxlite.config.schema import flatten
from maxlite.config.start_model import require_weights_fit, start_values
from maxlite.config.values import suggest
from maxlite.errors import UserError
from maxlite.registry import SOURCES, TAUGHT_LOSSES, WEIGHT_FORMATS, has_reference
from maxlite.storage.file_io import read_json_object
from maxlite.storage.tokenizer_files import is_same_content, resolve_owned


class ModelFolder(NamedTuple):
  """A folder with a model."""

  path: Path
  format: str  # A name in the table WEIGHT_FORMATS.

  @property
  def vocab_size(self) -> int | None:
    """The model's vocabulary; None if a config.json does not have it."""
    if self.format == "run":
      return int(read_values(self.path / "config.yml")["vocab_size"])
    return read_json_object(self.path / "config.json", "copy it again").get("vocab_size")


def model_folders(key: str, path: str, members: Collection[str] = ()) -> list[ModelFolder]:
  """The folders of the models at `path`: one, or one per member of an ensemble.

  Args:
    key: the key of the config that has this path, for messages.
    path: empty for no folder.
    members: the members of the ensemble that are wanted; empty: all.

  Raises:
    UserError: the folder is of no known format, or has no such members.
  """
  if not path:
    return []
  folder = Path(os.path.expanduser(path))
  run = RunFolder(folder)
  is_run = run.config.is_file()
  names = run.member_names() if is_run else []
  _check_members(f"{key}={path}", members, names)
  if names:
    chosen = [name for name in names if name in members or not members]
    return [ModelFolder(run.member(name).directory, "run") for name in chosen]
  if is_run:
    return [ModelFolder(folder, "run")]
  if (folder / "config.json").is_file():
    return [ModelFolder(folder, "huggingface")]
  raise UserError(f"{key}={path} is not a run folder (config.yml) and has no config.json")


def _check_members(source: str, members: Collection[str], names: Collection[str]) -> None:
  """Raise UserError if the folder lacks one of `members`; `names` are those that it has."""
  unknown = sorted(set(members) - set(names))
  if not unknown:
    return
  hint = "it is not an ensemble; write no members"
  if names:
    hint = suggest(unknown[0], names)
  raise UserError(f"{source} has no member {unknown[0]}: {hint}")


def teacher_folders(cfg: Config) -> list[ModelFolder]:
  """The models of the teacher, whose predictions are averaged; empty if no loss reads them.

  Raises:
    UserError: there is no such folder or member, or a model has another vocabulary.
  """
  if not any(loss in TAUGHT_LOSSES for loss in losses_of(cfg)):
    return []
  vocab_size = cfg.model.vocab_size
  folders = model_folders("teacher_path", cfg.training.teacher_path, cfg.training.teacher_members)
  for folder in folders:
    if folder.vocab_size != vocab_size:
      raise UserError(
        f"the teacher {folder.path} has vocab_size={folder.vocab_size}, the student {vocab_size}: "
        "a student needs the vocabulary of its teacher; write the same tokenizer and vocab_size"
      )
    _require_same_tokenizer(f"the teacher {folder.path}", folder, cfg)
  return folders


def reference_folders(cfg: Config) -> list[ModelFolder]:
  """The reference model of a loss; empty if it is in no folder, or no loss reads it.

  Raises:
    UserError: there is no such folder, it is an ensemble, or its model has another vocabulary.
  """
  if not any(has_reference(loss, cfg.training.grpo_beta) for loss in losses_of(cfg)):
    return []
  key = "reference_path"
  path = cfg.training.reference_path
  folders = model_folders(key, path)
  if len(folders) > 1:
    raise UserError(f"{key}={path} is an ensemble: name a folder in its members/")
  for folder in folders:
    if folder.vocab_size != cfg.model.vocab_size:
      raise UserError(
        f"{key}={path} has vocab_size={folder.vocab_size}, the model {cfg.model.vocab_size}: name "
        "the model that training starts from, or write the same vocab_size"
      )
    _require_same_tokenizer(f"{key}={path}", folder, cfg)
  return folders


def _require_same_tokenizer(source: str, folder: ModelFolder, cfg: Config) -> None:
  """Raise UserError if the ids of a model of equal vocabulary stand for other texts.

  Templates are compared where the run reads conversations, and both have a file of their own.
  """
  kinds = [SOURCES.entry(part.data.dataset_type) for part in mixture_of(cfg.data)]
  if any(kind.is_synthetic for kind in kinds):
    return
  theirs = WEIGHT_FORMATS.entry(folder.format).read_keys(folder.path)
  if theirs.get("tokenizer_type", cfg.data.tokenizer_type) != cfg.data.tokenizer_type:
    raise UserError(
      f"{source} has tokenizer_type={theirs['tokenizer_type']}, the run {cfg.data.tokenizer_type}: "
      "both models must read the same ids; write the same tokenizer"
    )
  own = flatten(cfg.data)
  keys = ["tokenizer_path"]
  if any(kind.has_conversations or kind.has_prompts for kind in kinds):
    keys.append("chat_template_path")
  for key in keys:
    path = resolve_owned(str(theirs.get(key, "")), folder.path)
    if path and own[key] and not is_same_content(path, own[key]):
      raise UserError(
        f"{source} has another {key}, {path}: both models must read the same ids; write "
        f"{key}={path}"
      )


def losses_of(cfg: Config) -> list[str]:
  """The losses of the phases, or that of the run, as names in the table LOSSES."""
  losses = [phase.loss for phase in phases_of(cfg)]
  return losses or [cfg.training.loss_type]


def check_model_folders(cfg: Config, *, is_new: bool = True) -> None:
  """Check the folders whose parameters the run reads.

  Args:
    cfg: the config of the run.
    is_new: whether the run starts now; otherwise it has its own parameters.

  Raises:
    UserError: a folder is missing, of another model, or needs plug-ins that `cfg` does not name.
  """
  parents: list[ModelFolder] = []
  if is_new:
    parents = model_folders("load_parameters_path", cfg.checkpoint.load_parameters_path)
    values = flatten(cfg)
    require_weights_fit(values, start_values(values))
  for folder in (*teacher_folders(cfg), *reference_folders(cfg), *parents):
    if folder.format == "run":
      read_saved(folder.path / "config.yml", cfg)
