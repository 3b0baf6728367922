"""Files and folders that are written or read as a whole."""

import contextlib
import errno
import glob
import json
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from maxlite.errors import UserError
from maxlite.storage.json_values import JsonObject

# Limits of files that may be a stranger's, and are read as a whole [bytes].
MAX_CONFIG_BYTES = 4 << 20
MAX_JSON_BYTES = 256 << 20  # a large tokenizer has 33 MB
_CANNOT_OPEN = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # links, pipes, folders


def irregularity(path: Path, *, is_folder: bool = False, follows_links: bool = False) -> str:
  """Return why a path is not a file, or not a folder; empty if it is, or if there is none.

  A link is no file, unless `follows_links`; one to a folder is a folder.
  """
  is_link = path.is_symlink()
  try:
    mode = path.stat().st_mode
  except FileNotFoundError:
    return "is a link to nothing" if is_link else ""
  except OSError as error:
    # What reads the path reports other errors.
    return "is a loop of links" if error.errno == errno.ELOOP else ""
  if is_folder:
    return "" if stat.S_ISDIR(mode) else "is not a folder"
  if is_link and not follows_links:
    return f"is a link to {path.readlink()}"
  if stat.S_ISREG(mode):
    return ""
  return "is a folder" if stat.S_ISDIR(mode) else "is not a file"


def require_regular_files(folder: Path) -> None:
  """Raise OSError if a folder contains a link, or something whose reading may never end."""
  for parent, folders, files in os.walk(folder):
    for name in files:
      path = Path(parent, name)
      problem = irregularity(path)
      if problem:
        raise OSError(f"{path.relative_to(folder)} {problem}")
    for name in folders:
      path = Path(parent, name)
      if path.is_symlink():  # os.walk does not look into it
        raise OSError(f"{path.relative_to(folder)} is a link to {os.readlink(path)}")


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follows_links: bool = False) -> int:
  """Open a regular file, and return its descriptor.

  A folder of a stranger may have links, through which another file would be read or written, and
  pipes and devices, whose reading never ends.

  Args:
    path: of the file.
    flags: as in `os.open`; O_CREAT creates the file.
    follows_links: whether a link to a regular file is opened too.

  Raises:
    UserError: the path is something else.
  """
  if not follows_links:
    flags |= os.O_NOFOLLOW
  try:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
  except OSError as error:
    if error.errno not in _CANNOT_OPEN:
      raise
  except ValueError:  # a null character
    raise UserError(f"{path} is not the name of a file: correct it") from None
  else:
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
      return descriptor
    os.close(descriptor)
  problem = irregularity(path, follows_links=follows_links)
  raise UserError(f"{path} {problem or 'is not a file'}: replace it by a file, or move it away")


def read_regular(path: Path, max_bytes: int, *, follows_links: bool = False) -> bytes:
  """Return the content of a regular file.

  Raises:
    UserError: the path is something else, or has more than `max_bytes` bytes.
  """
  with open(open_regular(path, follows_links=follows_links), "rb") as file:
    content = file.read(max_bytes + 1)
  if len(content) > max_bytes:
    raise UserError(f"{path} has more than {max_bytes:,} bytes: replace it, or move it away")
  return content


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
  """Give errors of the operating system the name of the file; those of writes have none."""
  try:
    yield
  except OSError as error:
    error.filename = error.filename or str(path)
    raise


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
  """Yield a new file that replaces `path`, also a link, once it is on disk; create its folder."""
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
  try:
    with named_errors(path), unfinished.open("xb") as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    unfinished.replace(path)
  except BaseException:
    unfinished.unlink(missing_ok=True)
    raise


def write_atomically(path: Path, content: str | bytes) -> None:
  """Replace `path` by a file with `content`, which is on disk on return; create its folder."""
  if isinstance(content, str):
    content = content.encode()
  with replaced(path) as file:
    file.write(content)


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
    value = json.loads(read_regular(path, MAX_JSON_BYTES, follows_links=True))
  except UserError:
    raise
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path} is not JSON ({error}): {fix}") from None
  if not isinstance(value, dict):
    raise UserError(f"{path} is not a JSON object: {fix}")
  return value


def require_own_file(path: Path) -> None:
  """Raise UserError if `path` is a link out of its folder, whose content would be copied.

  The hub's cache is `snapshots/REVISION/...` with links to `blobs` next to it.
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
