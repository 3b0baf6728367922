"""The folder of a run: its files, its saved config, and its local copy if on an object store."""

import errno
import fcntl
import functools
import itertools
import json
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.file_io import write_atomically
from maxlite.config.object_store import (
  AnyPath,
  download,
  filesystem,
  is_remote,
  join,
  list_files,
  list_names,
  size_and_version,
  store_errors,
  to_path,
  upload,
)
from maxlite.config.phases import without_data
from maxlite.config.raw_values import show
from maxlite.config.rules.violation import ENSEMBLE_KEYS
from maxlite.config.saved import differences, read_values
from maxlite.config.schema import KEYS
from maxlite.config.yaml_files import MODEL_FILE, read_file

Changes = dict[str, tuple[Any, Any]]  # {key: (value before, value now)}
_LOCK = ".lock"
_STEP = re.compile("0|[1-9][0-9]*")  # 00099 is not a step, nor are digits of other scripts
_BEST = "best"  # stands for the best member of an ensemble
# Folders with many objects that no command reads from the copy of an object store.
_NOT_COPIED = (_LOCK, "checkpoints", "checkpoints_damaged", "members", "profile", "tensorboard")


class RunFolder:
  """The paths of a run's files; creates nothing until something is written.

  On an object store, `directory` is a copy on this machine; see `RunMirror`.
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
    self._run_id = self.directory / "run_id"
    self._lock = self.directory / _LOCK  # held by the process that trains, which it names
    self._locked: int | None = None  # file descriptor

  def member_names(self) -> list[str]:
    """Return the names of the members of an ensemble; empty for other runs."""
    if self.mirror:
      return sorted(self.mirror.member_names())
    return sorted(path.parent.name for path in self._members.glob("*/config.yml"))

  def member(self, name: str) -> "RunFolder":
    """Return the run folder of a member; raise UserError if there is none with this name.

    Args:
      name: of a member; `best`, if no member has that name, is the one with the lowest held-out
        loss.
    """
    names = self.member_names()
    if name == _BEST and names and name not in names:
      name = self._best_member()
    if name not in names:
      problem = f"has no member {name!r}" if name else "is an ensemble"
      fix = f"set member={'|'.join(names[:20])}" if names else "leave out member"
      raise UserError(f"{self.place} {problem}: {fix}")
    return RunFolder(join(self.place, "members", name))

  def _best_member(self) -> str:
    """The first of members.jsonl, where the members are in the order of their held-out losses."""
    results = self.directory / "members.jsonl"
    if not results.exists():
      raise UserError(
        f"{self.place} has no {results.name}, which ranks the members at the end of training: "
        "write the name of a member instead of best"
      )
    with results.open(encoding="utf-8") as file:
      first = json.loads(file.readline())
    if first["best_loss"] is None:
      raise UserError(
        f"{self.place}: no member has a held-out loss: write the name of a member instead of best"
      )
    return str(first["name"])

  def run_id(self, default: str = "") -> str:
    """Return the id that distinguishes this run from others, such as earlier ones of its name.

    If it is missing, it is `default`, or a new one if that is empty.
    """
    if not self._run_id.exists():
      write_atomically(self._run_id, default or secrets.token_hex(8))
    return self.saved_run_id()

  def saved_run_id(self) -> str:
    """Return the id of this run; empty if it has none yet."""
    if not self._run_id.exists():
      return ""
    return self._run_id.read_text("utf-8", errors="replace").strip()

  def require_regular(self) -> None:
    """Raise UserError if a file or folder of the run is something else, such as a link loop."""
    files = (self.config, self.model, self.metrics, self.expert_load, self._run_id, self._lock)
    folders = (self.directory, self.directory / "checkpoints", self.tensorboard, self._members)
    for path in (*folders, *files):
      if problem := _irregularity(path, is_folder=path in folders):
        raise UserError(f"run folder {self.place}: {path.name} {problem}: move it away")

  def require_writable(self) -> None:
    """Raise UserError if the folder cannot be written, without creating it; see also `lock`."""
    self.require_regular()
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
    self.require_regular()
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
      UserError: such a key differs, so that the run's weights would not fit, or one of the two is
        an ensemble and the other a single run.
    """
    if not self.config.exists():
      return None
    saved = read_values(self.config)
    self._check_kind(saved, values)
    changes = differences(saved, values)
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

  def _check_kind(self, saved: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise UserError if one config is of an ensemble and the other of a single run."""
    was_ensemble = any(saved[key] for key in ENSEMBLE_KEYS)
    is_ensemble = any(values[key] for key in ENSEMBLE_KEYS)
    if self.member_names() and was_ensemble and not is_ensemble:
      raise UserError(
        f"run folder {self.place} holds an ensemble, and this command trains a single run: choose "
        "another run_name, or give the members, sweep or search of the ensemble"
      )
    is_run = self.metrics.exists() or self.model.exists()
    if is_run and is_ensemble and not was_ensemble:
      raise UserError(
        f"run folder {self.place} holds a single run, which an ensemble would hide: choose another "
        f"run_name; load_parameters_path={self.place} starts all members from its parameters"
      )

  def save_config(self, changes: Changes | None, save: Callable[[Path], None]) -> None:
    """Write config.yml with `save(path)` if it changed; the previous is kept as config.N.yml."""
    if changes is not None and not changes:
      return
    if changes is not None:
      numbered = (self.directory / f"config.{n}.yml" for n in itertools.count(1))
      shutil.copyfile(self.config, next(path for path in numbered if not path.exists()))
    save(self.config)
    self.upload()


def step_of(name: str) -> int | None:
  """Return the step of the checkpoint folder `name`; None if it is not named like one."""
  return int(name) if _STEP.fullmatch(name) else None


def require_regular_files(folder: AnyPath) -> None:
  """Raise OSError if a local folder contains something whose reading may never end."""
  if not isinstance(folder, Path):
    return
  for parent, _, names in os.walk(folder):
    for name in names:
      path = Path(parent, name)
      if problem := _irregularity(path, is_folder=False):
        raise OSError(f"{path.relative_to(folder)} {problem}")


def _irregularity(path: Path, *, is_folder: bool) -> str:
  """Return why a path is not a file, or not a folder; empty if it is, or if there is none."""
  try:
    mode = path.stat().st_mode
  except FileNotFoundError:
    return "is a link to nothing" if path.is_symlink() else ""
  except OSError as error:
    return "is a loop of links" if error.errno == errno.ELOOP else ""  # its reader reports others
  if is_folder:
    return "" if stat.S_ISDIR(mode) else "is not a folder"
  if stat.S_ISREG(mode):
    return ""
  return "is a folder" if stat.S_ISDIR(mode) else "is not a file"


def _only_data(name: str, before: Any, now: Any) -> bool:
  """Return whether two values of `phases` differ only in their data, which shape no weights."""
  return name == "phases" and without_data(before) == without_data(now)


@functools.cache
def open_mirror(uri: str) -> "RunMirror":
  """Open the copy that all of this process use; raise UserError if the store cannot be read."""
  return RunMirror(uri.rstrip("/"))


class RunMirror:
  """The local copy of the run folder at `uri` on an object store, which ends with the process.

  Metrics, plots and TensorBoard events are appended or drawn on local disk, and written back whole
  before every checkpoint and at the end of a run. Checkpoints are written in place by Orbax.
  """

  def __init__(self, uri: str):
    self.uri, self._store = uri, filesystem(uri)
    self.directory = Path(tempfile.mkdtemp(prefix="maxlite_"))
    weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
    self._written: dict[Path, tuple[int, int | str]] = {}  # size and time of modification
    self._token = ""  # of the lock, while this process trains
    for name, is_folder in list_names(uri).items():
      if name not in _NOT_COPIED:
        place = join(uri, name)
        for file in list_files(place) if is_folder else (place,):
          local = self.directory / str(file).removeprefix(f"{uri}/")
          download(str(file), local)
          self._written[local] = size_and_version(local)

  def member_names(self) -> list[str]:
    """Return the names of the members of an ensemble."""
    return [name for name, is_folder in list_names(join(self.uri, "members")).items() if is_folder]

  def lock(self) -> None:
    """Declare this process the one that trains; an earlier one stops at its next `upload`.

    Raises:
      UserError: the store cannot be written.
    """
    self._token = f"process {os.getpid()} on {socket.gethostname()}, {secrets.token_hex(8)}"
    with store_errors(self.uri):
      self._store.pipe_file(join(self.uri, _LOCK), self._token.encode())

  def upload(self) -> None:
    """Write back the files that have changed, each atomically.

    Raises:
      UserError: another process has locked the run, or the store cannot be written.
    """
    with store_errors(self.uri):
      holder = self._store.cat_file(join(self.uri, _LOCK)).decode() if self._token else ""
    if holder != self._token:
      raise UserError(
        f"{self.uri} has been taken over by {holder.split(',')[0]}, which was started later: "
        "this process stops, as two would overwrite each other"
      )
    for local in sorted(self.directory.rglob("*")):
      if local.is_file() and self._written.get(local) != (stamp := size_and_version(local)):
        upload([(local, join(self.uri, local.relative_to(self.directory).as_posix()))])
        self._written[local] = stamp
