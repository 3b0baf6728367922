"""The tokenizer that a run folder owns: copied there at the first start, with digests.

The saved config of the run names these files as `{run}/tokenizer/NAME`, so the folder can be moved.
"""

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from maxlite.errors import UserError
from maxlite.storage.file_io import MAX_CONFIG_BYTES, new_folder, read_regular, require_own_file
from maxlite.storage.object_store import AnyPath, local_tokenizer

FOLDER = "tokenizer"  # in the folder of a run
RUN = "{run}/"  # begins a path that is relative to the folder of its file
DIGESTS = "tokenizer.sha256"  # in the format of `sha256sum --check`
OWNED_KEYS = ("tokenizer_path", "chat_template_path")
# What a tokenizer is read from besides its main file; the last two have the ids of bos and eos.
FILES_BESIDE = (
  "tokenizer_config.json",
  "special_tokens_map.json",
  "added_tokens.json",
  "chat_template.jinja",
  "generation_config.json",
  "config.json",
)
MAIN_FILES = {"huggingface": "tokenizer.json", "sentencepiece": "tokenizer.model"}
_TEMPLATE = "given_template.jinja"  # that of chat_template_path, besides the tokenizer's own


def resolve_owned(path: str, folder: AnyPath) -> str:
  """Return a path of the saved config in `folder`, relative to which it may be.

  Imports of earlier versions name the folder that they wrote, which may have been moved since.
  """
  if path.startswith(RUN):
    return str(folder / path.removeprefix(RUN))
  parts = path.rsplit("/", 2)
  moved = folder / FOLDER / parts[-1]
  is_of_import = parts[-2:-1] == [FOLDER] and "://" not in path
  if is_of_import and not Path(path).is_file() and moved.exists():
    return str(moved)
  return path


def copy_tokenizer(values: Mapping[str, object], folder: Path) -> bool:
  """Copy the files that OWNED_KEYS name to the run in `folder`, and write their digests.

  Returns:
    Whether anything was written; the run may own them already.

  Raises:
    UserError: a file cannot be read or is a link out of its folder, or the run has another one.
  """
  path = str(values["tokenizer_path"])
  template = str(values["chat_template_path"])
  if not (path or template):
    return False
  target = folder / FOLDER
  main = None
  if path:
    main = local_tokenizer(path)
  if not target.exists():
    with new_folder(target) as unfinished:
      _copy_files(main, _main_file(values), template, unfinished)
    return True
  if main is not None and main.parent.resolve() == target.resolve():  # an earlier version's import
    if (target / DIGESTS).exists():
      return False
    write_digests(target)
    return True
  own = owned_values(values, folder)
  for key, value in own.items():
    if not is_same_file(key, str(values[key]), resolve_owned(value, folder)):
      raise UserError(f"{target} is of an earlier start with another {key}: move it away")
  return False


def _main_file(values: Mapping[str, object]) -> str:
  """The name of the copy of the file at tokenizer_path; plug-ins read files of any name."""
  path = str(values["tokenizer_path"])
  return MAIN_FILES.get(str(values["tokenizer_type"]), path.rpartition("/")[2])


def _copy_files(main: Path | None, main_name: str, template: str, target: Path) -> None:
  sources = {}
  if template:
    sources[_TEMPLATE] = Path(template).expanduser()
  if main is not None:
    sources[main_name] = main
    for name in FILES_BESIDE:
      if (main.parent / name).is_file():
        require_own_file(main.parent / name)
        sources[name] = main.parent / name
  for name, source in sources.items():
    try:
      shutil.copyfile(source, target / name)
    except OSError as error:
      reason = error.strerror
      raise UserError(f"{source} cannot be copied to the run ({reason}): correct it") from None
  write_digests(target)


def owned_values(values: Mapping[str, object], folder: Path) -> dict[str, str]:
  """Return the values of OWNED_KEYS for the saved config of the run in `folder`.

  They are those of `values` for files of which the run has no copy.
  """
  own = {key: str(values[key]) for key in OWNED_KEYS}
  copies = {
    "tokenizer_path": _main_file(values),
    "chat_template_path": _TEMPLATE,
  }
  for key, name in copies.items():
    if own[key] and (folder / FOLDER / name).is_file():
      own[key] = f"{RUN}{FOLDER}/{name}"
  return own


def is_same_file(key: str, path: str, own: str) -> bool:
  """Whether `path`, a value of one of OWNED_KEYS, names what the run has a copy of at `own`.

  A tokenizer is the same if the files beside it are, too.
  """
  if not path or not own:
    return path == own
  if key == "chat_template_path":
    return _digest(Path(path).expanduser()) == _digest(Path(own))
  main = local_tokenizer(path)
  copy = Path(own)
  pairs = [(main, copy)]
  for name in FILES_BESIDE:
    pairs.append((main.parent / name, copy.parent / name))
  return all(_digest(file) == _digest(other) for file, other in pairs)


def is_same_content(path: str, own: str) -> bool:
  """Whether two files of tokenizers or templates are equal, whatever is beside them."""
  return _digest(local_tokenizer(path)) == _digest(local_tokenizer(own))


def write_digests(folder: Path) -> None:
  """Write the SHA-256 of every file in `folder` to DIGESTS."""
  lines = []
  for file in sorted(folder.iterdir()):
    lines.append(f"{_digest(file)}  {file.name}\n")
  (folder / DIGESTS).write_text("".join(lines), "utf-8")


def require_unchanged(folder: Path) -> None:
  """Raise UserError if a file in `folder` is not the one whose digest the run has."""
  for name, digest in _digests(folder).items():
    file = folder / name
    if _digest(file) != digest:
      raise UserError(
        f"{file} is not the file that the run was made with (SHA-256 in {DIGESTS}): restore it"
      )


def _digests(folder: Path) -> dict[str, str]:
  """{file name: SHA-256} of the files that the run owns; empty for runs of earlier versions."""
  file = folder / DIGESTS
  if not file.is_file():
    return {}
  digests = {}
  text = read_regular(file, MAX_CONFIG_BYTES).decode(errors="replace")
  for line in text.splitlines():
    digest, _, name = line.partition("  ")
    if "/" in name or name.startswith("."):
      raise UserError(f"{file} names {name!r}, which is not a file of this folder: restore it")
    digests[name] = digest
  return digests


def _digest(file: Path) -> str:
  """The SHA-256 of a file; empty if there is none."""
  if not file.is_file():
    return ""
  with file.open("rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
