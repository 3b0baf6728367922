"""Paths on object stores (`s3://` by s3fs, `gs://` by gcsfs) and on the Hugging Face Hub (`hf://`).

Stores are opened through fsspec. Credentials come from the standard places of a store's own tools,
never from the config. Some files are read from a local copy.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple, TypeAlias, TypeVar

import fsspec
from etils import epath

from maxlite.errors import UserError, write_line
from maxlite.storage.file_io import new_folder
from maxlite.storage.json_values import Json

T = TypeVar("T")
AnyPath: TypeAlias = Path | epath.Path
# {scheme: (package that opens it, where credentials come from)}
STORES = {
  "s3://": ("s3fs", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or a role"),
  "gs://": ("gcsfs", "`gcloud auth application-default login`, or a service account"),
}
HUB = "hf://"
TOKENIZER_FILES = ("*.json", "*.jinja", "*.model")
# Seconds of waiting for the first answer of a bucket; each is reported, and the last is the limit.
_WAITS = (5, 10, 20, 40)
# Seconds between the calls of a store that answers by an error.
_PAUSES = (0.2, 1.0)
_CACHE = Path("~/.cache/maxlite/folders")  # holds local copies
_KINDS = {"datasets": "dataset", "spaces": "space"}  # kinds of repositories on the hub by prefix


def is_remote(path: str | AnyPath) -> bool:
  """Return whether `path` is on an object store."""
  return str(path).startswith(tuple(STORES))


def join(folder: str | AnyPath, *names: str) -> str:
  """Return the path of `names` in `folder`, of which either may be a URI."""
  if is_remote(folder):
    return os.path.join(folder, *names)
  return str(Path(folder, *names))


def to_path(path: str | AnyPath) -> AnyPath:
  """Return a path with the interface of pathlib; `~` is expanded."""
  if not is_remote(path):
    return Path(path).expanduser()
  filesystem(str(path))  # raises UserError if its package is missing
  return epath.Path(path)


def filesystem(uri: str) -> fsspec.AbstractFileSystem:
  """Open the store of `uri`.

  Raises:
    UserError: its package is missing, or its bucket does not answer, which is reported meanwhile.
  """
  scheme = _scheme_of(uri)
  _require_answer(scheme, bucket_of(uri))
  return _filesystem(scheme)


def _scheme_of(uri: str) -> str:
  """The key of STORES with which `uri` begins."""
  return next(scheme for scheme in STORES if uri.startswith(scheme))


@functools.cache
def _require_answer(scheme: str, bucket: str) -> None:
  """Raise UserError if `bucket` does not answer in time; any answer is one, such as a refusal."""
  answered = concurrent.futures.Future[None]()
  # A daemon, as it may wait forever.
  threading.Thread(target=_ask, args=(scheme, bucket, answered), daemon=True).start()
  waited = 0
  for seconds in _WAITS:
    try:
      error = answered.exception(timeout=seconds - waited)
    except TimeoutError:
      waited = seconds
      write_line(f"waiting for {bucket} to answer ... {seconds} s")
      continue
    if error is not None:
      raise error
    return
  raise UserError(
    f"{bucket} does not answer within {waited} s: check network, proxy and endpoint (of s3://, "
    "AWS_ENDPOINT_URL), or name a local folder"
  )


def _ask(scheme: str, bucket: str, answered: concurrent.futures.Future[None]) -> None:
  try:
    store = _filesystem(scheme)  # gs:// looks for credentials on the network
  except UserError as error:
    answered.set_exception(error)
    return
  # What is wrong is raised by the call that needs the store.
  with contextlib.suppress(Exception):
    store.info(bucket)
  answered.set_result(None)


@functools.cache
def _filesystem(scheme: str) -> fsspec.AbstractFileSystem:
  name = scheme.removesuffix("://")
  # Other processes write too. Through the configuration, Orbax's own file systems are alike.
  aliases = [name]
  if name == "gs":
    aliases.append("gcs")
  for alias in aliases:
    fsspec.config.conf.setdefault(alias, {}).setdefault("use_listings_cache", False)
  logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it also raises every error that it logs
  try:
    return fsspec.filesystem(name)
  except ImportError:
    package = STORES[scheme][0]
    raise UserError(f"{scheme} paths need a package: pip install {package}") from None


@contextlib.contextmanager
def store_errors(uri: str) -> Iterator[None]:
  """Turn the errors of a store into UserError, with the place of credentials."""
  try:
    yield
  except UserError:
    raise
  except FileNotFoundError:
    raise UserError(f"{uri}: no such bucket or object: create the bucket or correct it") from None
  # botocore, aiohttp, google.auth and fsspec raise various types.
  except Exception as error:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    _, places = STORES[_scheme_of(uri)]
    raise UserError(
      f"{uri} cannot be used ({reason}): check network, permissions and credentials ({places})"
    ) from None


def repeated(uri: str, call: Callable[[], T]) -> T:
  """Return the result of `call`, which reads a store, repeated if the store answers by an error.

  Raises:
    UserError: all calls have failed.
  """
  for pause in _PAUSES:
    with contextlib.suppress(Exception):  # the last call raises it
      return call()
    time.sleep(pause)
  with store_errors(uri):
    return call()


@dataclasses.dataclass(frozen=True)
class RemoteFile:
  """An object that is read in place; `version` changes if its content does."""

  uri: str
  size: int  # [bytes]
  version: str

  @property
  def name(self) -> str:
    return self.uri.rsplit("/", 1)[1]

  @property
  def suffix(self) -> str:
    return Path(self.name).suffix

  def __str__(self) -> str:
    return self.uri

  def open(self, mode: str = "rb") -> BinaryIO:
    """Open for reading; reads fetch large blocks, and fail if the object has been replaced."""
    return filesystem(self.uri).open(self.uri, mode)


DataFile: TypeAlias = Path | RemoteFile


def size_and_version(file: DataFile) -> tuple[int, int | str]:
  """Return the size in bytes and the version, or time of modification [ns], of a file."""
  if isinstance(file, RemoteFile):
    return file.size, file.version
  stat = file.stat()
  return stat.st_size, stat.st_mtime_ns


def list_files(uri: str) -> list[RemoteFile]:
  """List the objects that `uri` names: one, those that match a glob, or those of a folder.

  Empty objects that consoles of stores create as folders (`data/`) are left out.

  Raises:
    UserError: the store cannot be read, or an object's name is no path of a file.
  """
  store = filesystem(uri)
  with store_errors(uri):
    is_glob = any(character in uri for character in "*?[")
    if is_glob:
      found = store.glob(uri, detail=True)
    else:
      found = store.find(uri, detail=True)
    if not found:
      store.info(bucket_of(uri))  # raises if there is none
  files = []
  for info in found.values():
    if info["type"] == "file" and not _is_folder_marker(info):
      _require_file_path(bucket_of(uri), info["name"].partition("/")[2])
      files.append(_remote_file(uri, info))
  return sorted(files, key=str)


def list_names(uri: str) -> dict[str, bool]:
  """Return {name: whether it is a folder} of what the folder `uri` has; empty if there is none.

  Raises:
    UserError: the bucket does not exist or cannot be read, or a name is not that of a file.
  """
  store = filesystem(uri)
  with store_errors(uri):
    try:
      found = store.ls(uri, detail=True)
    except FileNotFoundError:
      store.info(bucket_of(uri))
      return {}
  names = {}
  place = uri.partition("://")[2].rstrip("/")
  for info in found:
    if _is_folder_marker(info):
      continue
    name = info["name"].removeprefix(place).removeprefix("/").removesuffix("/")
    _require_file_path(uri, name)
    names[name] = info["type"] == "directory"
  return names


def _is_folder_marker(info: dict[str, Json]) -> bool:
  return info["type"] == "file" and info["name"].endswith("/") and not info["size"]


def _require_file_path(place: str, name: str) -> None:
  """Raise UserError if the name of an object is not a relative path, which stays in its folder.

  A key of a store is any text; as a path, it could name a file outside a local copy.
  """
  if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
    raise UserError(
      f"{place} has an object named {name!r}, which is no path of a file: rename or delete it"
    )


def bucket_of(uri: str) -> str:
  """The URI of the bucket that holds `uri`."""
  scheme, _, path = uri.partition("://")
  return f"{scheme}://{path.split('/')[0]}"


def _remote_file(uri: str, info: dict[str, Json]) -> RemoteFile:
  """The file that a store describes by `info`, on the store of `uri`."""
  scheme = uri.partition("://")[0]
  version = str(info.get("ETag") or info.get("etag")).strip('"')
  return RemoteFile(f"{scheme}://{info['name']}", int(info["size"]), version)


def download(uri: str, file: Path) -> None:
  """Copy an object to a local file, whose folder is created."""
  try:
    file.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:  # such as an object whose name is that of a folder of others
    raise UserError(
      f"{uri} cannot be copied to {file} ({error.strerror}): rename the object, or free space"
    ) from None
  with store_errors(uri):
    filesystem(uri).get_file(uri, str(file))


def upload(files: Iterable[tuple[Path, str]]) -> None:
  """Copy each local file to a URI, in this order; each object is replaced atomically."""
  for file, uri in files:
    with store_errors(uri):
      filesystem(uri).put_file(str(file), uri)


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
  files = [file for file in list_files(path) if _matches(file.name, patterns)]
  if not files:
    raise UserError(f"{path} has no {' or '.join(patterns)}: correct it")
  versions = [(file.uri, file.version) for file in files]
  name = hashlib.blake2b(repr(versions).encode(), digest_size=12).hexdigest()
  folder = _CACHE.expanduser() / name
  if not folder.exists():
    try:
      with new_folder(folder) as partial:
        for file in files:
          name = file.uri.removeprefix(path).strip("/") or file.name
          download(file.uri, partial / name)
    except OSError:
      if not folder.exists():  # otherwise another process was first
        raise
  return folder


def _matches(name: str, patterns: Sequence[str]) -> bool:
  return any(PurePosixPath(name).match(pattern) for pattern in patterns)


def local_tokenizer(path: str) -> Path:
  """Return the tokenizer file `path`, copied with the small files next to it if it is a URI."""
  if not (is_remote(path) or path.startswith(HUB)):
    return Path(path).expanduser()
  folder, _, name = path.rpartition("/")
  return local_folder(folder, TOKENIZER_FILES) / name


class _Repository(NamedTuple):
  """The parts of `hf://[datasets/]OWNER/NAME[@REVISION][/PATH]`."""

  kind: str | None  # `dataset` or `space`; None: a model
  owner: str
  name: str
  revision: str  # empty: the default one
  inside: str  # PATH, empty for the whole repository


def _repository_of(uri: str) -> _Repository:
  parts = list(PurePosixPath(uri.removeprefix(HUB)).parts)
  kind = None
  if parts and parts[0] in _KINDS:
    kind = _KINDS[parts.pop(0)]
  name = ""
  revision = ""
  if len(parts) > 1:
    name, _, revision = parts[1].partition("@")
  if not name:
    raise UserError(f"{uri} names no repository: write hf://OWNER/NAME or hf://datasets/OWNER/NAME")
  return _Repository(kind, parts[0], name, revision, "/".join(parts[2:]))


def hub_path(uri: str, patterns: Sequence[str] = ("*",)) -> str:
  """Return the local path of `hf://[datasets/]OWNER/NAME[@REVISION][/PATH]`, downloaded if needed.

  PATH may be a file, a folder (of which `patterns` are downloaded) or a glob. Without a network, or
  with HF_HUB_OFFLINE=1, what is in the hub's cache is used.

  Raises:
    UserError: the repository does not exist, needs credentials, or is not in the cache.
  """
  repository = _repository_of(uri)
  from huggingface_hub import snapshot_download  # slow to import
  from huggingface_hub.errors import HfHubHTTPError

  allowed = [repository.inside]
  for pattern in patterns:
    allowed.append(f"{repository.inside}/{pattern}".lstrip("/"))
  try:
    folder = snapshot_download(
      f"{repository.owner}/{repository.name}",
      repo_type=repository.kind,
      revision=repository.revision or None,
      allow_patterns=allowed,
    )
  # Repositories that do not exist, the network, and names that are not valid.
  except (HfHubHTTPError, OSError, ValueError) as error:
    reason = " ".join(str(error).split())[:200]
    raise UserError(
      f"{uri} is neither on the hub nor in its cache on this machine ({reason}): correct it, check "
      "the network, or log in with `hf auth login`"
    ) from None
  return str(Path(folder, repository.inside))
