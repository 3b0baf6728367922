"""Expansion of `dataset_path` entries to files."""

import glob
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from maxlite.config.errors import UserError

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def expand_paths(entries: Iterable[str], suffix: str, key: str) -> list[Path]:
  """Expand files, folders and globs, in order and without duplicates.

  A folder yields its visible files with `suffix`, and `stdlib` the sources of Python's library.

  Raises:
    UserError: an entry of the config key `key` yields no file.
  """
  files: dict[Path, None] = {}
  for entry in entries:
    found = _expand(entry, suffix)
    if not found:
      kind = f"*{suffix} file" if suffix else "file"
      raise UserError(f"{key}: {entry!r} gives no {kind}: name a file, a folder or a glob")
    files.update(dict.fromkeys(found))
  return list(files)


def _expand(entry: str, suffix: str) -> list[Path]:
  if entry == STDLIB:
    return _stdlib_files() if not suffix else []
  path = Path(entry).expanduser()
  if path.is_dir():
    return sorted(file.resolve() for file in path.rglob(f"*{suffix}") if _is_visible(file, path))
  if path.is_file():
    return [path.resolve()]
  matches = map(Path, glob.glob(str(path), recursive=True))
  return sorted(match.resolve() for match in matches if match.is_file())


def _is_visible(file: Path, folder: Path) -> bool:
  hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
  return file.is_file() and not hidden


def _stdlib_files() -> list[Path]:
  root = Path(sysconfig.get_path("stdlib")).resolve()
  files = root.rglob("*.py")
  return sorted(f for f in files if not _NOT_STDLIB.intersection(f.relative_to(root).parts))
