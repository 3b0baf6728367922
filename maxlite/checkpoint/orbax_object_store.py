"""Orbax on object stores: arrays through TensorStore, a checkpoint complete by its last object.

The only import of private modules of Orbax 0.12, which writes arrays to `gs://` but not to `s3://`,
although TensorStore has a driver for both.
"""

import functools
import os
import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from maxlite.config.errors import UserError
from maxlite.config.object_store import AnyPath, filesystem, list_names, repeated, store_errors

try:
  from orbax.checkpoint._src.path import gcs_utils
  from orbax.checkpoint._src.serialization import tensorstore_utils
except ImportError:
  gcs_utils = tensorstore_utils = None

# Stores have no atomic rename: Orbax writes to the final place, and this object last.
COMMIT_LAST = ocp.path.atomicity.CommitFileTemporaryPath
COMMITTED = "commit_success.txt"
_S3 = "s3://"


@functools.cache
def open_object_stores() -> None:
  """Have Orbax open `s3://` paths with TensorStore.

  Replaces three private functions of Orbax, which has no public place for it.

  Raises:
    UserError: this version of Orbax lacks one of them.
  """
  replaced = (tensorstore_utils, "_use_gcs_driver"), (tensorstore_utils, "_normalize_path")
  for module, name in (*replaced, (gcs_utils, "get_kvstore_for_gcs")):
    if not hasattr(module, name):
      raise UserError(
        f"{ocp.__name__} {ocp.__version__} lacks {name}, with which checkpoints reach an object "
        "store: pip install orbax-checkpoint==0.12.8"
      )
  normalize, gcs_store = tensorstore_utils._normalize_path, gcs_utils.get_kvstore_for_gcs
  tensorstore_utils._normalize_path = lambda path: normalize(path).replace("s3:/", _S3)
  tensorstore_utils._use_gcs_driver = lambda path: path.startswith(("gs://", _S3))
  gcs_utils.get_kvstore_for_gcs = lambda path: (
    _s3_store(path) if path.startswith(_S3) else gcs_store(path)
  )


def key_value_store(path: AnyPath) -> dict[str, Any]:
  """Return the TensorStore specification of the folder `path`."""
  if str(path).startswith((_S3, "gs://")):
    open_object_stores()
    return gcs_utils.get_kvstore_for_gcs(f"{path}/")
  return {"driver": "file", "path": f"{path.absolute()}/"}


def _s3_store(uri: str) -> dict[str, Any]:
  """The TensorStore specification of an `s3://` folder."""
  bucket, _, path = uri.removeprefix(_S3).partition("/")
  return {"driver": "s3", "bucket": bucket, "path": path, **_s3_options()}


@functools.cache
def _s3_options() -> dict[str, Any]:
  """Endpoint and kind of credentials, from where s3fs has found them."""
  store, options = filesystem(_S3), {}
  store.connect()
  client = store.s3.meta
  if not client.endpoint_url.endswith(".amazonaws.com"):  # of AWS, TensorStore finds the region
    region = client.config.region_name or "us-east-1"
    options = {"endpoint": client.endpoint_url, "aws_region": region}
  if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise TensorStore logs all places without any
    options["aws_credentials"] = {"type": "environment"}
  return options


def is_complete(folder: AnyPath) -> bool:
  """Return whether a checkpoint was written to the end; a local one was then renamed."""
  return isinstance(folder, Path) or repeated(str(folder), (folder / COMMITTED).exists)


def list_folder(folder: AnyPath) -> list[str]:
  """Return the names in a folder; empty if there is none."""
  if isinstance(folder, Path):
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
  return list(repeated(str(folder), functools.partial(list_names, str(folder))))


def remove_folder(folder: AnyPath) -> None:
  """Remove a folder and all its contents."""
  if isinstance(folder, Path):
    shutil.rmtree(folder)
    return
  with store_errors(str(folder)):
    (folder / COMMITTED).unlink(missing_ok=True)  # first: half of a checkpoint is none
    folder.rmtree(missing_ok=True)


def move_folder(folder: AnyPath, target: AnyPath) -> None:
  """Rename a folder; on an object store, copy its objects and remove them."""
  if isinstance(folder, Path):
    folder.rename(target)
    return
  with store_errors(str(folder)):
    filesystem(str(folder)).copy(str(folder), str(target), recursive=True)
  remove_folder(folder)
