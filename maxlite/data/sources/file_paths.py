"""Expansion of `dataset_path` entries to files."""

import fnmatch
import glob
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from maxlite.data.sources.compressed import inner_name
from maxlite.errors import UserError
from maxlite.registry import SOURCES, other_dataset_type
from maxlite.storage.file_io import expand_glob, read_json_object
from maxlite.storage.object_store import (
  HUB,
  DataFile,
  hub_path,
  is_remote,
  list_files,
  size_and_version,
)

STDLIB = "stdlib"
_MAY_BE_COMPRESSED = ("", ".jsonl")  # of the formats that are text
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
_COMPRESSED = re.compile(r"\.(gz|tgz|bz2|xz|zst|zip|7z)", re.IGNORECASE)
# In a folder, a file with any other suffix is text.
_NOT_TEXT = re.compile(
  rf"{_COMPRESSED.pattern}|\.(jsonl|parquet|arrow|tar|bin|np[yz]|pth?|safetensors|gguf|h5|pkl|db|"
  r"sqlite|pdf|docx?|xlsx?|pptx?|png|jpe?g|gif|webp|bmp|tiff?|ico|mp[34]|wav|flac|ogg|mov|avi|"
  r"ttf|woff2?|so|o|a|dll|dylib|exe|pyc|class|jar|wasm)",
  re.IGNORECASE,
)
_TOKENIZED = re.compile(r"\.(bin|idx|np[yz])", re.IGNORECASE)
_STATE = "state.json"  # of a folder of `datasets`' save_to_disk: the files of the dataset
_CACHE = "cache-*.arrow"  # what `datasets` leaves next to them: results of map and filter
# Folders of tables whose files are not all data: a log says which ones are.
_LOGS = {"_delta_log": "a Delta table", ".hoodie": "a Hudi table"}


class ExpandedPaths(NamedTuple):
  """The files to read, and the other visible files of the folders."""

  files: list[DataFile]
  skipped: list[DataFile]


class _Listing(NamedTuple):
  """The files that a path names, and their names in the folder if it is one."""

  name_by_file: dict[DataFile, str]
  is_folder: bool


def expand_paths(
  entries: Iterable[str], suffix: str, key: str, also: tuple[str, ...] = ()
) -> ExpandedPaths:
  """Expand entries to files, in order and without duplicates.

  A folder yields its visible files with `suffix`, and `stdlib` the sources of Python's library.

  Args:
    entries: files, folders, globs or URIs.
    suffix: of the files to read; empty: text files.
    key: the config key of the entries, for messages.
    also: further suffixes of files to read.

  Raises:
    UserError: an entry yields no file, or one of another format.
  """
  files: dict[DataFile, None] = {}
  skipped: list[DataFile] = []
  for entry in entries:
    found, others = _expand(entry, suffix, also)
    if not found:
      raise UserError(f"{key}: {entry!r} gives no {_describe_lack(suffix, others)}")
    for file in found:
      if file.suffix not in also:
        _require_readable(file, suffix, key)
      files[file] = None
    skipped += others
  never_read = [file for file in skipped if file not in files]
  return ExpandedPaths(list(files), never_read)


def _describe_lack(suffix: str, others: list[DataFile]) -> str:
  """Return what there is instead of files with `suffix`, and what to do."""
  kind = f"*{suffix} file" if suffix else "file"
  fix = "name a file, a folder or a glob"
  if not others:
    return f"{kind}: {fix}"
  types = {other_dataset_type(file.name, _dataset_type(suffix)) for file in others}
  if len(types) == 1 and "" not in types:
    fix = f"write dataset_type={types.pop()}"
  return f"{kind} (only {count_suffixes(others)}): {fix}"


def _require_readable(file: DataFile, suffix: str, key: str) -> None:
  """Raise UserError if a file that was named is of another format, or of another compression."""
  other = other_dataset_type(file.name, _dataset_type(suffix))
  if other:
    raise UserError(f"{key}: {file} is of another type: write dataset_type={other}")
  if file.suffix != suffix and _TOKENIZED.fullmatch(file.suffix):
    raise UserError(
      f"{key}: {file} holds numbers, such as token ids, and no text: name the files of its text, "
      "or write dataset_type=tokens with a .bin or .npy file"
    )
  if not _COMPRESSED.fullmatch(file.suffix) or _is_read(file.name, suffix):
    return
  if suffix == ".jsonl" and inner_name(file.name).endswith(".json"):
    return
  fix = "decompress it"
  if suffix in _MAY_BE_COMPRESSED:
    fix += f", or name it *{suffix or '.txt'}.gz"
  raise UserError(f"{key}: {file} is compressed: {fix}")


def _dataset_type(suffix: str) -> str:
  """Return the dataset_type whose files have a suffix; without one: text."""
  named = [name for name, source in SOURCES.entries().items() if suffix in source.suffixes]
  return next(iter(named), "text")


def total_bytes(entries: Iterable[str]) -> int:
  """Return the size of all visible files that `entries` name, of any format."""
  total = 0
  for entry in entries:
    expanded = _expand(entry, suffix="")
    for file in [*expanded.files, *expanded.skipped]:
      size, _ = size_and_version(file)
      total += size
  return total


def count_suffixes(files: Iterable[DataFile]) -> str:
  """Return the number of files by suffix: `3 .py and 12 .txt`."""
  counter = Counter(file.suffix or "without suffix" for file in files)
  counts = [f"{count:,} {suffix}" for suffix, count in sorted(counter.items())]
  return " and ".join(counts)


def _expand(entry: str, suffix: str, also: tuple[str, ...] = ()) -> ExpandedPaths:
  """Return the files of an entry with `suffix`, and the other visible ones if it is a folder."""
  if entry == STDLIB:
    files = [] if suffix else _stdlib_sources()
    return ExpandedPaths(files, [])
  listing = _list_store(entry) if is_remote(entry) else _list_local(entry)
  if suffix:
    _refuse_logs(entry, listing)
  read: list[DataFile] = []
  others: list[DataFile] = []
  for file, name in listing.name_by_file.items():
    if not listing.is_folder:
      is_data = not glob.has_magic(entry) or not _is_cache(file)
    elif _is_hidden(name):
      continue
    else:
      is_data = _is_read(name, suffix) or name.endswith(also)
      if _is_left_over(name, suffix) or _is_cache(file):
        is_data = False
    if is_data:
      read.append(file)
    else:
      others.append(file)
  return ExpandedPaths(read, others)


def _stdlib_sources() -> list[DataFile]:
  """Return the sources of Python's library, without tests and installed packages."""
  root = Path(sysconfig.get_path("stdlib")).resolve()
  sources: list[DataFile] = []
  for file in sorted(root.rglob("*.py")):
    parts = file.relative_to(root).parts
    if not _NOT_STDLIB.intersection(parts):
      sources.append(file)
  return sources


def _is_hidden(name: str) -> bool:
  """Return whether a file, or a folder above it, has a name that starts with a dot."""
  return any(part[0] == "." for part in name.split("/"))


def _is_left_over(name: str, suffix: str) -> bool:
  """Return whether a file, or a folder above it, is of a job that did not end, or a log.

  As in Spark, Hive and pyarrow, such names of tables and rows start with `_`.
  """
  parts = name.split("/")
  return "_temporary" in parts or (bool(suffix) and any(part[0] == "_" for part in parts))


def _is_cache(file: DataFile) -> bool:
  """Return whether an Arrow file is none of those that `datasets` lists in the folder's state.

  Without a state, `datasets` names what it caches.
  """
  if file.suffix != ".arrow":
    return False
  if isinstance(file, Path):
    state = file.parent / _STATE
    if state.is_file():
      return file.name not in _listed(state)
  return fnmatch.fnmatch(file.name, _CACHE)


def _listed(state: Path) -> frozenset[str]:
  """Return the files that a state of `datasets` lists; raise UserError if it lists none."""
  content = read_json_object(state, "save the dataset again, or name its files")
  entries = content.get("_data_files")
  if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
    raise UserError(f"{state} lists no _data_files: save the dataset again, or name its files")
  return frozenset(str(entry.get("filename")) for entry in entries)


def _refuse_logs(entry: str, listing: _Listing) -> None:
  """Raise UserError for a table that keeps removed files until a log is read."""
  for name in listing.name_by_file.values():
    parts = name.split("/")[:-1]
    for folder, kind in _LOGS.items():
      if folder in parts:
        raise UserError(f"{entry} is {kind}, which may hold removed files: export its rows first")
    if name.endswith(".metadata.json") and parts[-1:] == ["metadata"]:
      raise UserError(f"{entry} is an Iceberg table, which may hold removed files: export its rows")


def _is_read(name: str, suffix: str) -> bool:
  """Return whether a file is read if its folder is named, by its suffix.

  The suffix of a compression is left out where it may be compressed.
  """
  inner = name
  if suffix in _MAY_BE_COMPRESSED:
    inner = inner_name(name)
  if suffix:
    return inner.endswith(suffix)
  kind = PurePosixPath(inner).suffix
  if _NOT_TEXT.fullmatch(kind):
    return False
  is_compressed = inner != name
  return bool(kind) or not is_compressed


def _list_store(uri: str) -> _Listing:
  """List the objects that a URI names."""
  found = list_files(uri)
  is_one_object = [str(file) for file in found] == [uri]
  name_by_file: dict[DataFile, str] = {}
  for file in found:
    name_by_file[file] = str(file).removeprefix(uri).strip("/")
  is_folder = not is_one_object and not glob.has_magic(uri)
  return _Listing(name_by_file, is_folder)


def _list_local(entry: str) -> _Listing:
  """List the files on disk that an entry names, without symbolic links, in order."""
  if entry.startswith(HUB):
    path = Path(hub_path(entry))
  else:
    path = Path(entry).expanduser()
  is_folder = path.is_dir()
  name_by_real: dict[Path, str] = {}
  for file in _local_files(path):
    name = file.name
    if is_folder:
      name = file.relative_to(path).as_posix()
    real = file
    if "snapshots" not in file.parts:  # files of the hub's cache are links to names without suffix
      real = file.resolve()
    name_by_real[real] = name
  in_order: dict[DataFile, str] = {}
  for real in sorted(name_by_real):
    in_order[real] = name_by_real[real]
  return _Listing(in_order, is_folder)


def _local_files(path: Path) -> list[Path]:
  """Return the file of this path, the files in the folder, or those that match the glob."""
  if path.is_file():
    return [path]
  if path.is_dir():
    matches = list(path.rglob("*"))
  else:
    matches = [Path(match) for match in expand_glob(str(path))]
  return [match for match in matches if match.is_file()]
