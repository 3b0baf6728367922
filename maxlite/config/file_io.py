"""Files and folders that are written or read as a whole."""

import contextlib
import glob
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from maxlite.config.errors import UserError
from maxlite.config.json_values import JsonObject


def write_atomically(path: Path, text: str) -> None:
  """Replace `path` by a file with `text`, which is on disk on return; create its folder."""
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(f".{path.name}.{os.getpid()}")
  with unfinished.open("w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  unfinished.replace(path)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
  """Yield a new folder that is renamed to `path` on success and removed on failure."""
  unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
  try:
    unfinished.mkdir(parents=True)
    yield unfinished
    unfinished.rename(path)
  except BaseException:
    shutil.rmtree(unfinished, ignore_errors=True)
    raise


def read_json_object(path: Path, fix: str) -> JsonObject:
  """Read a JSON object; raise UserError that ends in `fix` if the file has none."""
  try:
    value = json.loads(path.read_bytes())
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path} is not JSON ({error}): {fix}") from None
  if not isinstance(value, dict):
    raise UserError(f"{path} is not a JSON object: {fix}")
  return value


def require_own_file(path: Path) -> None:
  """Raise UserError if `path` is a link out of its folder, whose content would be copied.

  The hub's cache is `snapshots/REVISION/...` with links to `blobs` beside it.
  """
  target = path.resolve()
  folder = path.parent.resolve()
  allowed = [folder]
  for parent in folder.parents:
    if parent.name == "snapshots":
      allowed.append(parent.parent / "blobs")
  if not any(target.is_relative_to(each) for each in allowed):
    raise UserError(f"{path} is a link to {target}: replace it by a copy, or remove it")


def expand_glob(pattern: str) -> Iterator[str]:
  """Yield what matches, as `glob.glob(recursive=True)`, but `**` does not follow links to folders.

  A link to the root of the file system, or to a folder above it, would be searched in full.
  """
  parts = PurePosixPath(pattern).parts
  if "**" not in parts:
    yield from glob.iglob(pattern)
    return
  first = parts.index("**")
  last = first
  while last + 1 < len(parts) and parts[last + 1] == "**":
    last += 1
  below = "/".join(parts[last + 1 :]) or "*"
  above = str(PurePosixPath(*parts[:first]))
  for root in glob.iglob(above):
    if os.path.islink(root) and glob.has_magic(above):
      continue
    for folder, names, _ in os.walk(root):
      names[:] = [name for name in names if not name.startswith(".")]
      yield from expand_glob(os.path.join(glob.escape(folder), below))
