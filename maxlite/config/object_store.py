"""Paths on object stores: `s3://` by s3fs, `gs://` by gcsfs; both are opened through fsspec.

Credentials come from the standard places of the store's own tools, never from the config.
"""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import fsspec
from etils import epath

from maxlite.config.errors import UserError

AnyPath: TypeAlias = Path | epath.Path
# {scheme: (package that opens it, where credentials come from)}
STORES = {
  "s3://": ("s3fs", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, ~/.aws, or a role"),
  "gs://": ("gcsfs", "`gcloud auth application-default login`, or a service account"),
}


def is_remote(path: str | AnyPath) -> bool:
  """Return whether `path` is on an object store."""
  return str(path).startswith(tuple(STORES))


def join(folder: str | AnyPath, *names: str) -> str:
  """Return the path of `names` in `folder`, of which either may be a URI."""
  return os.path.join(folder, *names) if is_remote(folder) else str(Path(folder, *names))


def to_path(path: str | AnyPath) -> AnyPath:
  """Return a path with the interface of pathlib; `~` is expanded."""
  if not is_remote(path):
    return Path(path).expanduser()
  filesystem(str(path))  # raises UserError if its package is missing
  return epath.Path(path)


def filesystem(uri: str) -> fsspec.AbstractFileSystem:
  """Open the store of `uri`; raise UserError if its package is missing."""
  return _filesystem(next(scheme for scheme in STORES if uri.startswith(scheme)))


@functools.cache
def _filesystem(scheme: str) -> fsspec.AbstractFileSystem:
  name = scheme.removesuffix("://")
  # Other processes write too. Through the configuration, Orbax's own file systems are alike.
  for alias in (name, "gcs") if name == "gs" else (name,):
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
    places = next(places for scheme, (_, places) in STORES.items() if uri.startswith(scheme))
    raise UserError(
      f"{uri} cannot be used ({reason}): check network, permissions and credentials ({places})"
    ) from None


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

  Raises:
    UserError: the store cannot be read.
  """
  store = filesystem(uri)
  with store_errors(uri):
    is_glob = any(character in uri for character in "*?[")
    found = store.glob(uri, detail=True) if is_glob else store.find(uri, detail=True)
    if not found:
      store.info(bucket_of(uri))  # raises if there is none
    files = (info for info in found.values() if info["type"] == "file")
    return sorted((_remote_file(uri, info) for info in files), key=str)


def list_names(uri: str) -> dict[str, bool]:
  """Return {name: whether it is a folder} of what the folder `uri` has; empty if there is none.

  Raises:
    UserError: the bucket does not exist, or cannot be read.
  """
  store = filesystem(uri)
  with store_errors(uri):
    try:
      found = store.ls(uri, detail=True)
    except FileNotFoundError:
      store.info(bucket_of(uri))
      return {}
  return {info["name"].rsplit("/", 1)[1]: info["type"] == "directory" for info in found}


def bucket_of(uri: str) -> str:
  scheme, _, path = uri.partition("://")
  return f"{scheme}://{path.split('/')[0]}"


def _remote_file(uri: str, info: dict[str, Any]) -> RemoteFile:
  scheme = uri.partition("://")[0]
  version = str(info.get("ETag") or info.get("etag")).strip('"')
  return RemoteFile(f"{scheme}://{info['name']}", int(info["size"]), version)


def download(uri: str, file: Path) -> None:
  """Copy an object to a local file, whose folder is created."""
  file.parent.mkdir(parents=True, exist_ok=True)
  with store_errors(uri):
    filesystem(uri).get_file(uri, str(file))


def upload(files: Iterable[tuple[Path, str]]) -> None:
  """Copy each local file to a URI, in this order; each object is replaced atomically."""
  for file, uri in files:
    with store_errors(uri):
      filesystem(uri).put_file(str(file), uri)
