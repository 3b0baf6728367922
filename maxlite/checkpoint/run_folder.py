"""The folder of a run: the paths of its files, and its saved config."""

import fcntl
import itertools
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maxlite.checkpoint.run_mirror import open_mirror
from maxlite.config.errors import UserError
from maxlite.config.file_io import write_atomically
from maxlite.config.files import MODEL_FILE, read_file
from maxlite.config.object_store import is_remote, join, to_path
from maxlite.config.phases import without_data
from maxlite.config.raw_values import show
from maxlite.config.saved import differences, read_saved
from maxlite.config.schema import KEYS

Changes = dict[str, tuple[Any, Any]]  # {key: (value before, value now)}


class RunFolder:
  """The paths of a run's files; creates nothing until something is written.

  On an object store, `directory` is a copy on this machine; see run_mirror.py.
  """

  TOKENIZER = "tokenizer"

  def __init__(self, directory: Path | str):
    """Raise UserError if `directory` is on an object store that cannot be read."""
    self.mirror = open_mirror(str(directory)) if is_remote(directory) else None
    self.place = self.mirror.uri if self.mirror else str(directory)  # for messages
    self.directory = self.mirror.directory if self.mirror else Path(directory)
    self.config = self.directory / "config.yml"
    self.model = self.directory / MODEL_FILE  # the model's keys, of an imported run
    self.tokenizer = self.directory / self.TOKENIZER  # of an imported run
    self.metrics = self.directory / "metrics.jsonl"
    self.eval_documents = self.directory / "eval_documents.jsonl"
    self.curves = self.directory / "curves.png"
    self.timeline = self.directory / "timeline.png"  # of a run with phases
    self.expert_load = self.directory / "expert_load.jsonl"
    self.expert_map = self.directory / "expert_load.png"
    self.tensorboard = self.directory / "tensorboard"
    self.checkpoints = to_path(join(self.place, "checkpoints"))
    self._members = self.directory / "members"  # of an ensemble
    self.profile = self.directory / "profile"
    self._run_id = self.directory / "run_id"  # of a run with local checkpoints or W&B
    self._lock = self.directory / ".lock"  # held by the process that trains, which it names
    self._locked: int | None = None  # file descriptor

  def member_names(self) -> list[str]:
    """Return the names of the members of an ensemble; empty for other runs."""
    if self.mirror:
      return sorted(self.mirror.member_names())
    return sorted(path.parent.name for path in self._members.glob("*/config.yml"))

  def member(self, name: str) -> "RunFolder":
    """Return the run folder of a member; raise UserError if there is none with this name."""
    names = self.member_names()
    if name not in names:
      problem = f"has no member {name!r}" if name else "is an ensemble"
      fix = f"set member={'|'.join(names[:20])}" if names else "leave out member"
      raise UserError(f"{self.place} {problem}: {fix}")
    return RunFolder(join(self.place, "members", name))

  def run_id(self) -> str:
    """Return the id, created if missing, that distinguishes this run from earlier ones."""
    if not self._run_id.exists():
      write_atomically(self._run_id, secrets.token_hex(8))
    return self._run_id.read_text()

  def require_writable(self) -> None:
    """Raise UserError if the folder cannot be written, without creating it; see also `lock`."""
    place = self.directory.absolute()
    parent = next(path for path in (place, *place.parents) if path.exists())
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
    try:
      self.directory.mkdir(parents=True, exist_ok=True)
      self._locked = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o666)
      fcntl.lockf(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self.unlock()
      holder = self._lock.read_text("utf-8") or "another process"
      raise UserError(
        f"{self.directory} is in use by {holder}: wait until it ends, stop it, or choose another "
        "run_name"
      ) from None
    except OSError as error:
      raise self._cannot_write(error.strerror) from None
    os.truncate(self._locked, 0)
    os.write(self._locked, f"process {os.getpid()} on {socket.gethostname()}".encode())

  def upload(self) -> None:
    """Write changed files back to an object store; raise UserError if that is not possible."""
    if self.mirror:
      self.mirror.upload()

  def unlock(self) -> None:
    if self._locked is not None:
      os.close(self._locked)
      self._locked = None

  def config_changes(self, values: Mapping[str, Any]) -> Changes | None:
    """Return how `values`, of all keys, differ from the saved config; None at the first start.

    Keys that shape the model may not change. An imported run that has not been trained may change
    all keys except those of the imported model.

    Raises:
      UserError: such a key differs, so that the run's weights would not fit.
    """
    if not self.config.exists():
      return None
    changes = differences(read_saved(self.config), values)
    is_fixed = lambda name: KEYS[name].field.shapes_model and not _only_data(name, *changes[name])
    fixed = {name: pair for name, pair in changes.items() if is_fixed(name)}
    if self.model.exists() and not self.metrics.exists():  # imported but not trained yet
      imported = {setting.name for setting in read_file(self.model, "run folder")}
      fixed = {name: pair for name, pair in fixed.items() if name in imported}
    if fixed:
      before = " ".join(f"{name}={show(old)}" for name, (old, _) in fixed.items())
      now = " ".join(f"{name}={show(new)}" for name, (_, new) in fixed.items())
      raise UserError(
        f"run folder {self.place} was made with {before}, this command says {now}: choose "
        f"another run_name, or set {before}"
      )
    return changes

  def save_config(self, changes: Changes | None, save: Callable[[Path], None]) -> None:
    """Write config.yml with `save(path)` if it changed; the previous is kept as config.N.yml."""
    if changes is not None and not changes:
      return
    if changes is not None:
      numbered = (self.directory / f"config.{n}.yml" for n in itertools.count(1))
      shutil.copyfile(self.config, next(path for path in numbered if not path.exists()))
    save(self.config)
    self.upload()


def _only_data(name: str, before: Any, now: Any) -> bool:
  """Return whether two values of `phases` differ only in their data, which shape no weights."""
  return name == "phases" and without_data(before) == without_data(now)
