"""Folders of checkpoints, on disks and on object stores."""

import functools
import shutil
from pathlib import Path

from maxlite.storage.object_store import AnyPath, filesystem, list_names, repeated, store_errors

COMMITTED = "commit_success.txt"  # Orbax writes it last, since stores have no atomic rename


def is_complete(folder: AnyPath) -> bool:
  """Return whether a checkpoint was written to the end; a local one was then renamed."""
  if isinstance(folder, Path):
    return True
  marker = folder / COMMITTED
  return repeated(str(folder), marker.exists)


def list_folder(folder: AnyPath) -> list[str]:
  """Return the names in a folder; empty if there is none."""
  if not isinstance(folder, Path):
    uri = str(folder)
    names = repeated(uri, functools.partial(list_names, uri))
    return list(names)
  if not folder.is_dir():
    return []
  return [path.name for path in folder.iterdir()]


def remove_folder(folder: AnyPath) -> None:
  """Remove a folder and all its contents."""
  if isinstance(folder, Path):
    shutil.rmtree(folder)
    return
  with store_errors(str(folder)):
    (folder / COMMITTED).unlink(missing_ok=True)  # first: half of a checkpoint is none
    folder.rmtree(missing_ok=True)


def move_folder(folder: AnyPath, target: AnyPath) -> None:
  """Rename a folder; on an object store, copy its objects and remove them."""
  if isinstance(folder, Path):
    folder.rename(target)
    return
  uri = str(folder)
  with store_errors(uri):
    store = filesystem(uri)
    store.copy(uri, str(target), recursive=True)
  remove_folder(folder)
