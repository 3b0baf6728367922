"""Expansion of `dataset_path` entries to files."""

import glob
import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from maxlite.config.errors import UserError

STDLIB = "stdlib"
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_COMPRESSED = re.compile(r"\.(gz|tgz|bz2|xz|zst|zip|7z)", re.IGNORECASE)
# In a folder, a file with any other suffix is text.
_NOT_TEXT = re.compile(
  rf"{_COMPRESSED.pattern}|\.(jsonl|parquet|arrow|tar|bin|np[yz]|pth?|safetensors|gguf|h5|pkl|db|"
  r"sqlite|pdf|docx?|xlsx?|pptx?|png|jpe?g|gif|webp|bmp|tiff?|ico|mp[34]|wav|flac|ogg|mov|avi|"
  r"ttf|woff2?|so|o|a|dll|dylib|exe|pyc|class|jar|wasm)",
  re.IGNORECASE,
)


def expand_paths(entries: Iterable[str], suffix: str, key: str) -> tuple[list[Path], list[Path]]:
  """Expand to (files, other visible files of the folders), in order and without duplicates.

  A folder yields its visible files with `suffix` (those of text if it is empty), and `stdlib` the
  sources of Python's library.

  Raises:
    UserError: an entry of the config key `key` yields no file, or a compressed one.
  """
  files: dict[Path, None] = {}
  skipped: list[Path] = []
  for entry in entries:
    found, others = _expand(entry, suffix)
    if not found:
      kind = f"*{suffix} file" if suffix else "file"
      only = f" (only {count_suffixes(others)})" if others else ""
      raise UserError(f"{key}: {entry!r} gives no {kind}{only}: name a file, a folder or a glob")
    if compressed := [file for file in found if _COMPRESSED.fullmatch(file.suffix)]:
      raise UserError(f"{key}: {compressed[0]} is compressed: decompress it")
    files.update((file.resolve(), None) for file in found)
    skipped += others
  return list(files), [file for file in skipped if file.resolve() not in files]


def count_suffixes(files: Iterable[Path]) -> str:
  """The number of files by suffix: `3 .py and 12 .txt`."""
  counts = sorted(Counter(file.suffix or "without suffix" for file in files).items())
  return " and ".join(f"{count:,} {suffix}" for suffix, count in counts)


def _expand(entry: str, suffix: str) -> tuple[list[Path], list[Path]]:
  """(files of an entry, other visible files of a folder)"""
  if entry == STDLIB:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    sources = [] if suffix else sorted(root.rglob("*.py"))
    is_excluded = lambda file: _NOT_STDLIB.intersection(file.relative_to(root).parts)
    return [file for file in sources if not is_excluded(file)], []
  path = Path(entry).expanduser()
  if path.is_dir():
    is_hidden = lambda file: any(part[0] == "." for part in file.relative_to(path).parts)
    visible = [file for file in path.rglob("*") if file.is_file() and not is_hidden(file)]
    visible.sort(key=Path.resolve)
    is_text = lambda file: not _NOT_TEXT.fullmatch(file.suffix)
    is_read = (lambda file: file.name.endswith(suffix)) if suffix else is_text
    return list(filter(is_read, visible)), list(itertools.filterfalse(is_read, visible))
  matches = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
  return sorted((match for match in matches if match.is_file()), key=Path.resolve), []
