"""Expansion of `dataset_path` entries to files."""

import glob
import itertools
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from maxlite.config.data_files import other_dataset_type
from maxlite.config.errors import UserError
from maxlite.config.file_io import expand_glob
from maxlite.config.object_store import (
  HUB,
  DataFile,
  hub_path,
  is_remote,
  list_files,
  size_and_version,
)
from maxlite.data.sources.compressed import inner_name

STDLIB = "stdlib"
_MAY_BE_COMPRESSED = ("", ".jsonl")  # of the formats, those of text
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_COMPRESSED = re.compile(r"\.(gz|tgz|bz2|xz|zst|zip|7z)", re.IGNORECASE)
# In a folder, a file with any other suffix is text.
_NOT_TEXT = re.compile(
  rf"{_COMPRESSED.pattern}|\.(jsonl|parquet|arrow|tar|bin|np[yz]|pth?|safetensors|gguf|h5|pkl|db|"
  r"sqlite|pdf|docx?|xlsx?|pptx?|png|jpe?g|gif|webp|bmp|tiff?|ico|mp[34]|wav|flac|ogg|mov|avi|"
  r"ttf|woff2?|so|o|a|dll|dylib|exe|pyc|class|jar|wasm)",
  re.IGNORECASE,
)


def expand_paths(
  entries: Iterable[str], suffix: str, key: str
) -> tuple[list[DataFile], list[DataFile]]:
  """Expand to (files, other visible files of the folders), in order and without duplicates.

  A folder yields its visible files with `suffix` (those of text if it is empty), and `stdlib` the
  sources of Python's library.

  Raises:
    UserError: an entry of the config key `key` yields no file, or one of another format.
  """
  files: dict[DataFile, None] = {}
  skipped: list[DataFile] = []
  for entry in entries:
    found, others = _expand(entry, suffix)
    if not found:
      raise UserError(f"{key}: {entry!r} gives no {_describe_lack(suffix, others)}")
    for file in found:
      _require_readable(file, suffix, key)
      files[file] = None
    skipped += others
  return list(files), [file for file in skipped if file not in files]


def _describe_lack(suffix: str, others: list[DataFile]) -> str:
  """What there is instead of files with `suffix`, and what to do."""
  kind = f"*{suffix} file" if suffix else "file"
  if not others:
    return f"{kind}: name a file, a folder or a glob"
  types = {other_dataset_type(file.name, _dataset_type(suffix)) for file in others}
  fix = "name a file, a folder or a glob"
  if len(types) == 1 and "" not in types:
    fix = f"write dataset_type={types.pop()}"
  return f"{kind} (only {count_suffixes(others)}): {fix}"


def _require_readable(file: DataFile, suffix: str, key: str) -> None:
  """Raise UserError if a file that was named is of another format, or of another compression."""
  if other := other_dataset_type(file.name, _dataset_type(suffix)):
    raise UserError(f"{key}: {file} is of another type: write dataset_type={other}")
  if not _COMPRESSED.fullmatch(file.suffix) or _is_read(file.name, suffix):
    return
  if suffix == ".jsonl" and inner_name(file.name).endswith(".json"):
    return
  fix = f", or name it *{suffix or '.txt'}.gz" if suffix in _MAY_BE_COMPRESSED else ""
  raise UserError(f"{key}: {file} is compressed: decompress it{fix}")


def _dataset_type(suffix: str) -> str:
  return suffix.removeprefix(".") or "text"


def total_bytes(entries: Iterable[str]) -> int:
  """The size of all visible files that `entries` name, of any format."""
  found = itertools.chain.from_iterable(_expand(entry, "") for entry in entries)
  return sum(size_and_version(file)[0] for file in itertools.chain.from_iterable(found))


def count_suffixes(files: Iterable[DataFile]) -> str:
  """The number of files by suffix: `3 .py and 12 .txt`."""
  counts = sorted(Counter(file.suffix or "without suffix" for file in files).items())
  return " and ".join(f"{count:,} {suffix}" for suffix, count in counts)


def _expand(entry: str, suffix: str) -> tuple[list[DataFile], list[DataFile]]:
  """(files of an entry, other visible files of a folder)"""
  if entry == STDLIB:
    root = Path(sysconfig.get_path("stdlib")).resolve()
    sources = [] if suffix else sorted(root.rglob("*.py"))
    is_excluded = lambda file: _NOT_STDLIB.intersection(file.relative_to(root).parts)
    return [file for file in sources if not is_excluded(file)], []
  names, is_folder = _list_store(entry) if is_remote(entry) else _list_local(entry)
  if not is_folder:
    return list(names), []
  read: list[DataFile] = []
  others: list[DataFile] = []
  for file, name in names.items():
    if not any(part[0] == "." for part in name.split("/")):
      (read if _is_read(name, suffix) else others).append(file)
  return read, others


def _is_read(name: str, suffix: str) -> bool:
  """Whether a file is read if its folder is named: by its suffix, without that of a compression."""
  inner = inner_name(name) if suffix in _MAY_BE_COMPRESSED else name
  if suffix:
    return inner.endswith(suffix)
  kind = PurePosixPath(inner).suffix
  return not _NOT_TEXT.fullmatch(kind) and (inner == name or bool(kind))


def _list_store(uri: str) -> tuple[dict[DataFile, str], bool]:
  """({object: name in the folder}, whether `uri` is a folder)"""
  found: list[DataFile] = list(list_files(uri))
  is_folder = not glob.has_magic(uri) and [str(file) for file in found] != [uri]
  return {file: str(file).removeprefix(uri).strip("/") for file in found}, is_folder


def _list_local(entry: str) -> tuple[dict[DataFile, str], bool]:
  """({file without symbolic links: name in the folder}, whether `entry` is a folder)"""
  path = Path(hub_path(entry) if entry.startswith(HUB) else entry).expanduser()
  is_folder = path.is_dir()
  matches = path.rglob("*") if is_folder else map(Path, expand_glob(str(path)))
  found = [path] if path.is_file() else [match for match in matches if match.is_file()]
  # Files of the hub's cache are links to names without a suffix.
  real = {file: file if "snapshots" in file.parts else file.resolve() for file in found}
  name = lambda file: file.relative_to(path).as_posix() if is_folder else file.name
  return {real[file]: name(file) for file in sorted(found, key=real.__getitem__)}, is_folder
