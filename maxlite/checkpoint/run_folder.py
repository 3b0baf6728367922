"""The folder of a run: its files, its saved config, and its local copy if on an object store."""

import fcntl
import json
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from maxlite.config.config_field import KeyValue
from maxlite.config.model_function import sealed_keys, unused_keys
from maxlite.config.phases import without_data
from maxlite.config.raw_values import show
from maxlite.config.rules.violation import ENSEMBLE_KEYS
from maxlite.config.saved import differences, read_values, save_resolved
from maxlite.config.schema import KEYS, ModelConfig, Section, build, flatten
from maxlite.config.yaml_files import MODEL_FILE, read_file
from maxlite.errors import UserError, printable
from maxlite.storage import tokenizer_files
from maxlite.storage.file_io import (
  MAX_CONFIG_BYTES,
  irregularity,
  open_regular,
  read_regular,
  write_atomically,
)
from maxlite.storage.mirror import LOCK, RunMirror, open_mirror
from maxlite.storage.object_store import is_remote, join, to_path

Changes: TypeAlias = dict[str, tuple[KeyValue, KeyValue]]  # {key: (value before, value now)}
RUN_ID = re.compile("[a-zA-Z0-9_ -]{1,64}")  # local checkpoints are in a folder of this name
_MAX_LINE_BYTES = 4096  # of a file with one line
_STEP = re.compile("0|[1-9][0-9]*")  # 00099 is not a step, nor are digits of other scripts
_BEST = "best"  # stands for the best member of an ensemble
_MAX_SHOWN_MEMBERS = 20  # in a message


class RunFolder:
  """The paths of a run's files; creates nothing until something is written.

  On an object store, `directory` is a copy on this machine; see `RunMirror`.
  """

  def __init__(self, directory: Path | str) -> None:
    """Raise UserError if `directory` is on an object store that cannot be read."""
    self.mirror: RunMirror | None = None
    self.place = str(directory)  # for messages
    self.directory = Path(directory)
    if is_remote(directory):
      self.mirror = open_mirror(str(directory))
      self.place = self.mirror.uri
      self.directory = self.mirror.directory
    self.config = self.directory / "config.yml"
    self.model = self.directory / MODEL_FILE  # only in an imported run: the keys of its model
    self.tokenizer = self.directory / tokenizer_files.FOLDER  # if data have one
    self.source = self.directory / "source.json"  # only in an imported run; see conversion.py
    self.starts = self.directory / "starts.jsonl"  # versions and devices of every start
    self.metrics = self.directory / "metrics.jsonl"
    self.eval_documents = self.directory / "eval_documents.jsonl"
    self.curves = self.directory / "curves.png"
    self.timeline = self.directory / "timeline.png"  # only in a run with phases
    self.expert_load = self.directory / "expert_load.jsonl"
    self.expert_map = self.directory / "expert_load.png"
    self.tensorboard = self.directory / "tensorboard"
    self.checkpoints = to_path(join(self.place, "checkpoints"))
    self._members = self.directory / "members"  # only in an ensemble
    self._results = self.directory / "members.jsonl"  # only in an ensemble
    self.profile = self.directory / "profile"
    self._run_id = self.directory / "run_id"
    self._lock = self.directory / LOCK  # held by the process that trains, which it names
    self._locked: int | None = None  # file descriptor

  def member_names(self) -> list[str]:
    """Return the names of the members of an ensemble; empty for other runs."""
    if self.mirror:
      return sorted(self.mirror.member_names())
    configs = self._members.glob("*/config.yml")
    return sorted(path.parent.name for path in configs)

  def member(self, name: str) -> "RunFolder":
    """Return the run folder of a member; raise UserError if there is none with this name.

    Args:
      name: the name of a member; `best`, if no member has that name, is the one with the lowest
        held-out loss.
    """
    names = self.member_names()
    if name == _BEST and names and name not in names:
      name = self._best_member()
    if name in names:
      return RunFolder(join(self.place, "members", name))
    problem = "is an ensemble"
    if name:
      problem = f"has no member {name!r}"
    fix = "leave out member"
    if names:
      choices = "|".join(names[:_MAX_SHOWN_MEMBERS])
      fix = f"set member={choices}"
    raise UserError(f"{self.place} {problem}: {fix}")

  def _best_member(self) -> str:
    """Return the first of members.jsonl, which is in the order of the held-out losses."""
    fix = "write the name of a member instead of best"
    name = self._results.name
    if not self._results.exists():
      raise UserError(
        f"{self.place} has no {name}, which ranks the members at the end of training: {fix}"
      )
    with open(open_regular(self._results), "rb") as file:
      line = file.readline(MAX_CONFIG_BYTES)
    try:
      first = json.loads(line)
      best = str(first["name"])
      loss = first["best_loss"]
    except (ValueError, KeyError, TypeError, RecursionError):
      raise UserError(f"{self.place}: line 1 of {name} is not a member's result: {fix}") from None
    if loss is None:
      raise UserError(f"{self.place}: no member has a held-out loss: {fix}")
    return best

  def run_id(self, default: str = "") -> str:
    """Return the id that distinguishes this run from others, such as earlier ones of its name.

    If it is missing, it is `default`, or a new one if that is empty.
    """
    run_id = self.saved_run_id()
    if not run_id:
      run_id = default or secrets.token_hex(8)
      write_atomically(self._run_id, run_id)
    return run_id

  def saved_run_id(self) -> str:
    """Return the id of this run; empty if it has none yet; UserError if it cannot be one."""
    if not os.path.lexists(self._run_id):
      return ""
    text = read_regular(self._run_id, _MAX_LINE_BYTES).decode(errors="replace").strip()
    if text and not RUN_ID.fullmatch(text):
      raise UserError(
        f"{self.place}: the file {self._run_id.name} is damaged: remove it, and the run takes its "
        "id from its latest checkpoint"
      )
    return text

  def require_regular(self) -> None:
    """Raise UserError if a file or folder of the run is something else, such as a link loop."""
    files = (
      self.config,
      self.model,
      self.starts,
      self.metrics,
      self.eval_documents,
      self.expert_load,
      self._results,
      self._run_id,
      self._lock,
    )
    folders = (
      self.directory,
      self.directory / "checkpoints",
      self.tensorboard,
      self._members,
    )
    for path in (*folders, *files):
      problem = irregularity(path, is_folder=path in folders)
      if problem:
        raise UserError(f"run folder {self.place}: {path.name} {problem}: move it away")

  def require_writable(self) -> None:
    """Raise UserError if the folder cannot be written, without creating it; see also `lock`."""
    self.require_regular()
    place = self.directory.absolute()
    parent = place
    while not parent.exists():
      parent = parent.parent
    if not parent.is_dir():
      raise self._cannot_write(f"{parent} is a file")
    if not os.access(parent, os.W_OK | os.X_OK):
      raise self._cannot_write(f"no permission in {parent}")

  def _cannot_write(self, reason: str | None) -> UserError:
    return UserError(
      f"{self.directory} cannot be written ({reason}): choose another base_output_directory"
    )

  def lock(self) -> None:
    """Lock the folder for this process, until `unlock`, or until the process ends or is killed.

    On an object store, the process that locked it last is the one that continues.

    Raises:
      UserError: another process has locked the folder, or it cannot be written.
    """
    if self.mirror:
      self.mirror.lock()
      return
    self.require_regular()
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      self._locked = open_regular(self._lock, os.O_RDWR | os.O_CREAT)
      fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self.unlock()
      content = read_regular(self._lock, _MAX_LINE_BYTES)
      holder = printable(content.decode(errors="replace")) or "another process"
      raise UserError(
        f"{self.directory} is in use by {holder}: wait until it ends, stop it, or choose another "
        "run_name"
      ) from None
    except OSError as error:
      raise self._cannot_write(error.strerror) from None
    os.truncate(self._locked, 0)
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    os.write(self._locked, holder.encode())

  def upload(self) -> None:
    """Write changed files back to an object store; raise UserError if that is not possible."""
    if self.mirror:
      self.mirror.upload()

  def unlock(self) -> None:
    if self._locked is not None:
      os.close(self._locked)
      self._locked = None

  def config_changes(self, values: Mapping[str, object]) -> Changes | None:
    """Return how `values`, of all keys, differ from the saved config; None at the first start.

    Keys that shape the model may not change. An imported run that has not been trained may change
    all keys except the keys of the imported model.

    Raises:
      UserError: such a key differs, so that the run's weights would not fit, or one of the two is
        an ensemble and the other a single run.
    """
    if not self.config.exists():
      return None
    saved = read_values(self.config)
    self._check_kind(saved, values)
    changes: Changes = differences(saved, values)
    for key in tokenizer_files.OWNED_KEYS:
      if key in changes and self._is_owned(key, *changes[key]):
        del changes[key]
    settings_before = []
    settings_now = []
    unused = unused_keys(build(ModelConfig, saved)) & unused_keys(build(ModelConfig, values))
    for name in self._fixed_keys(changes):
      if name in unused:  # of layers that the model does not have
        continue
      old, new = changes[name]
      settings_before.append(f"{name}={show(old)}")
      settings_now.append(f"{name}={show(new)}")
    if settings_before:
      before = " ".join(settings_before)
      now = " ".join(settings_now)
      raise UserError(
        f"run folder {self.place} was made with {before}, this command says {now}: choose "
        f"another run_name, or set {before}"
      )
    self._check_function(saved, values, changes)
    return changes

  def _check_function(
    self, saved: Mapping[str, KeyValue], values: Mapping[str, KeyValue], changes: Changes
  ) -> None:
    """Raise UserError if a run that was trained would compute another function.

    Before it is trained, an imported run may change all keys that its model does not fix.
    """
    before = sealed_keys(build(ModelConfig, saved))
    now = sealed_keys(build(ModelConfig, values))
    names = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    names -= set(values["allow_changes"])
    if not self.metrics.exists():
      names &= self._imported_keys()
    there = " ".join(f"{name}={show(saved[name])}" for name in changes if name in names)
    here = " ".join(f"{name}={show(values[name])}" for name in changes if name in names)
    if there:
      listed = ", ".join(name for name in changes if name in names)
      raise UserError(
        f"run folder {self.place} was trained with {there}, this command says {here}, with which "
        f"its weights compute another function: set {there}, or write allow_changes=[{listed}]"
      )

  def _imported_keys(self) -> set[str]:
    """The keys of the imported model; empty for other runs."""
    if not self.model.exists():
      return set()
    return {setting.name for setting in read_file(self.model, "run folder")}

  def _is_owned(self, key: str, saved: str, now: str) -> bool:
    """Return whether `now` names the file that the run has a copy of, at `saved`."""
    is_here = Path(saved).is_relative_to(self.tokenizer)
    return is_here and tokenizer_files.is_same_file(key, now, saved)

  def _fixed_keys(self, changes: Changes) -> list[str]:
    """Return the changed keys that may not change."""
    fixed = []
    for name, (old, new) in changes.items():
      if KEYS[name].field.shapes_model and not _only_data(name, old, new):
        fixed.append(name)
    is_trained = self.metrics.exists()
    if self.model.exists() and not is_trained:  # an imported run
      imported = self._imported_keys()
      fixed = [name for name in fixed if name in imported]
    return fixed

  def _check_kind(
    self,
    saved: Mapping[str, object],
    values: Mapping[str, object],
  ) -> None:
    """Raise UserError if one config is of an ensemble and the other of a single run."""
    was_ensemble = any(saved[key] for key in ENSEMBLE_KEYS)
    is_ensemble = any(values[key] for key in ENSEMBLE_KEYS)
    if self.member_names() and was_ensemble and not is_ensemble:
      raise UserError(
        f"run folder {self.place} holds an ensemble, and this command trains a single run: choose "
        "another run_name, or give the members, sweep, search or ladder of the ensemble"
      )
    is_run = self.metrics.exists() or self.model.exists()
    if is_run and is_ensemble and not was_ensemble:
      raise UserError(
        f"run folder {self.place} holds a single run, which an ensemble would hide: choose another "
        f"run_name; load_parameters_path={self.place} starts all members from its parameters"
      )

  def save_config(self, config: Section, changes: Changes | None) -> None:
    """Write config.yml if it changed; the previous one is kept as config.N.yml.

    Before that, the tokenizer that `config`, of all keys, names is copied to the folder.
    """
    is_copied = tokenizer_files.copy_tokenizer(flatten(config), self.directory)
    is_first_start = changes is None
    if not is_first_start:
      if not (changes or is_copied):
        return
      previous = read_regular(self.config, MAX_CONFIG_BYTES)
      write_atomically(self._unused_config_path(), previous)
    save_resolved(config, self.config)
    self.upload()

  def _unused_config_path(self) -> Path:
    """Return the first config.N.yml that does not exist."""
    n = 1
    while os.path.lexists(self.directory / f"config.{n}.yml"):
      n += 1
    return self.directory / f"config.{n}.yml"


def step_of(name: str) -> int | None:
  """Return the step of the checkpoint folder `name`; None if it is not named like one."""
  if not _STEP.fullmatch(name):
    return None
  return int(name)


def _only_data(name: str, before: KeyValue, now: KeyValue) -> bool:
  """Return whether two values of `phases` differ only in their data, which shape no weights."""
  if name != "phases":
    return False
  return without_data(before) == without_data(now)
