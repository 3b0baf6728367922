"""Local copies of what `hf://`, `s3://` and `gs://` paths name; local paths name themselves."""

import hashlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from maxlite.config.errors import UserError
from maxlite.config.file_io import new_folder
from maxlite.config.object_store import download, is_remote, list_files

HUB = "hf://"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model")
_CACHE = Path("~/.cache/maxlite/folders")
_KINDS = {"datasets": "dataset", "spaces": "space"}


def local_folder(path: str, patterns: Sequence[str] = ("*",)) -> Path:
  """Return the folder `path`, copied to this machine if it is a URI, once per version.

  Files that match none of `patterns` are not copied.

  Raises:
    UserError: there is nothing to copy, or it cannot be read.
  """
  if path.startswith(HUB):
    return Path(hub_path(path, patterns))
  if not is_remote(path):
    return Path(path).expanduser()
  matches = lambda file: any(PurePosixPath(file.name).match(pattern) for pattern in patterns)
  files = [file for file in list_files(path) if matches(file)]
  if not files:
    raise UserError(f"{path} has no {' or '.join(patterns)}: correct it")
  versions = [(file.uri, file.version) for file in files]
  name = hashlib.blake2b(repr(versions).encode(), digest_size=12).hexdigest()
  folder = _CACHE.expanduser() / name
  if not folder.exists():
    try:
      with new_folder(folder) as partial:
        for file in files:
          download(file.uri, partial / file.uri.removeprefix(path).strip("/"))
    except OSError:
      if not folder.exists():  # otherwise another process was first
        raise
  return folder


def local_tokenizer(path: str) -> Path:
  """Return the tokenizer file `path`, copied with the small files beside it if it is a URI."""
  if not (is_remote(path) or path.startswith(HUB)):
    return Path(path).expanduser()
  folder, _, name = path.rpartition("/")
  return local_folder(folder, TOKENIZER_FILES) / name


def hub_path(uri: str, patterns: Sequence[str] = ("*",)) -> str:
  """Return the local path of `hf://[datasets/]OWNER/NAME[@REVISION][/PATH]`, downloaded if needed.

  PATH may be a file, a folder (of which `patterns` are downloaded) or a glob. Without a network, or
  with HF_HUB_OFFLINE=1, what is in the hub's cache is used.

  Raises:
    UserError: the repository does not exist, needs credentials, or is not in the cache.
  """
  parts = PurePosixPath(uri.removeprefix(HUB)).parts
  kind = _KINDS.get(parts[0]) if parts else None
  owner, name, *path = (*parts[1 if kind else 0 :], "", "")
  name, _, revision = name.partition("@")
  inside = "/".join(filter(None, path))
  if not name:
    raise UserError(f"{uri} names no repository: write hf://OWNER/NAME or hf://datasets/OWNER/NAME")
  from huggingface_hub import snapshot_download  # slow to import
  from huggingface_hub.errors import HfHubHTTPError

  try:
    folder = snapshot_download(
      f"{owner}/{name}",
      repo_type=kind,
      revision=revision or None,
      allow_patterns=[inside, *(f"{inside}/{p}".lstrip("/") for p in patterns)],
    )
  # Repositories that do not exist, the network, and names that are not valid.
  except (HfHubHTTPError, OSError, ValueError) as error:
    reason = " ".join(str(error).split())[:200]
    raise UserError(
      f"{uri} is neither on the hub nor in its cache on this machine ({reason}): correct it, check "
      "the network, or log in with `hf auth login`"
    ) from None
  return str(Path(folder, inside))
