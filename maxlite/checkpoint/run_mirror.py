"""A run folder on an object store: its small files have a private copy on this machine.

Metrics, plots and TensorBoard events are appended or drawn on local disk, and written back whole
before every checkpoint and at the end of a run. Checkpoints are written in place by Orbax.
"""

import functools
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from maxlite.config.errors import UserError
from maxlite.config.object_store import (
  download,
  filesystem,
  join,
  list_files,
  list_names,
  size_and_version,
  store_errors,
  upload,
)

_LOCK = ".lock"
# Folders with many objects that no command reads from the copy.
_NOT_COPIED = (_LOCK, "checkpoints", "checkpoints_damaged", "members", "profile", "tensorboard")


@functools.cache
def open_mirror(uri: str) -> "RunMirror":
  """Open the copy that all of this process use; raise UserError if the store cannot be read."""
  return RunMirror(uri.rstrip("/"))


class RunMirror:
  """The local copy of the run folder at `uri`, which ends with the process."""

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
