"""The local copy of a run folder on an object store."""

import functools
import os
import secrets
import shutil
import socket
import tempfile
import weakref
from pathlib import Path

from maxlite.errors import UserError
from maxlite.storage.object_store import (
  download,
  filesystem,
  join,
  list_files,
  list_names,
  size_and_version,
  store_errors,
  upload,
)

LOCK = ".lock"
# Folders with many objects that no command reads from the copy.
_NOT_COPIED = (LOCK, "checkpoints", "checkpoints_damaged", "members", "profile", "tensorboard")


@functools.cache
def open_mirror(uri: str) -> "RunMirror":
  """Open the copy that all of this process use; raise UserError if the store cannot be read."""
  return RunMirror(uri.rstrip("/"))


class RunMirror:
  """The local copy of the run folder at `uri` on an object store, which ends with the process.

  Metrics, plots and TensorBoard events are appended or drawn on local disk, and written back whole
  before every checkpoint and at the end of a run. Checkpoints are written in place by Orbax.
  """

  def __init__(self, uri: str) -> None:
    """Copy the files of the run; raise UserError if the store cannot be read."""
    self.uri = uri
    self._store = filesystem(uri)
    self.directory = Path(tempfile.mkdtemp(prefix="maxlite_"))
    weakref.finalize(self, shutil.rmtree, self.directory, ignore_errors=True)
    # Size and time of modification of the local files that the store has too.
    self._written: dict[Path, tuple[int, int | str]] = {}
    self._token = ""  # content of the lock, while this process trains
    for name, is_folder in list_names(uri).items():
      if name in _NOT_COPIED:
        continue
      place = join(uri, name)
      if is_folder:
        for file in list_files(place):
          self._download(str(file))
      else:
        self._download(place)

  def _download(self, file: str) -> None:
    """Copy an object of the run."""
    local = self.directory / file.removeprefix(f"{self.uri}/")
    download(file, local)
    self._written[local] = size_and_version(local)

  def member_names(self) -> list[str]:
    """Return the names of the members of an ensemble."""
    names = list_names(join(self.uri, "members"))
    return [name for name, is_folder in names.items() if is_folder]

  def lock(self) -> None:
    """Declare this process the one that trains; an earlier one stops at its next `upload`.

    Raises:
      UserError: the store cannot be written.
    """
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    self._token = f"{holder}, {secrets.token_hex(8)}"
    lock = join(self.uri, LOCK)
    with store_errors(self.uri):
      self._store.pipe_file(lock, self._token.encode())

  def upload(self) -> None:
    """Write back the files that have changed, each atomically.

    Raises:
      UserError: another process has locked the run, or the store cannot be written.
    """
    holder = ""
    if self._token:
      with store_errors(self.uri):
        content = self._store.cat_file(join(self.uri, LOCK))
        holder = content.decode()
    if holder != self._token:
      process, _, _ = holder.partition(",")
      raise UserError(
        f"{self.uri} has been taken over by {process}, which was started later: "
        "this process stops, as two would overwrite each other"
      )
    for local in sorted(self.directory.rglob("*")):
      if not local.is_file():
        continue
      size_and_time = size_and_version(local)
      if self._written.get(local) != size_and_time:
        name = local.relative_to(self.directory).as_posix()
        upload([(local, join(self.uri, name))])
        self._written[local] = size_and_time
