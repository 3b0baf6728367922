"""Orbax on object stores: arrays through TensorStore, a checkpoint complete by its last object.

The only import of private modules of Orbax 0.12, which writes arrays to `gs://` but not to `s3://`,
although TensorStore has a driver for both.
"""

import functools
import os
import types
from typing import TypeAlias

import orbax.checkpoint as ocp

from maxlite.errors import UserError
from maxlite.storage.json_values import JsonObject
from maxlite.storage.object_store import AnyPath, filesystem

try:
  from orbax.checkpoint._src.path import gcs_utils
  from orbax.checkpoint._src.serialization import tensorstore_utils
except ImportError:
  gcs_utils = tensorstore_utils = None

_S3 = "s3://"
_GS = "gs://"
StoreSpec: TypeAlias = JsonObject  # a specification of TensorStore, as JSON values


@functools.cache
def open_object_stores() -> None:
  """Have Orbax open `s3://` paths with TensorStore.

  Replaces three private functions of Orbax, which has no public place for it.

  Raises:
    UserError: this version of Orbax lacks one of them.
  """
  _require_function(tensorstore_utils, "_use_gcs_driver")
  _require_function(tensorstore_utils, "_normalize_path")
  _require_function(gcs_utils, "get_kvstore_for_gcs")
  orbax_normalize_path = tensorstore_utils._normalize_path
  orbax_store = gcs_utils.get_kvstore_for_gcs

  def normalize_path(path: str) -> str:
    normalized = orbax_normalize_path(path)
    return normalized.replace("s3:/", _S3)

  def is_on_store(path: str) -> bool:
    return path.startswith((_GS, _S3))

  def store_of(path: str) -> StoreSpec:
    if path.startswith(_S3):
      return _s3_store(path)
    return orbax_store(path)

  tensorstore_utils._normalize_path = normalize_path
  tensorstore_utils._use_gcs_driver = is_on_store
  gcs_utils.get_kvstore_for_gcs = store_of


def _require_function(module: types.ModuleType | None, name: str) -> None:
  """Raise UserError if a private module of Orbax is missing, or has no function `name`."""
  if not hasattr(module, name):
    raise UserError(
      f"{ocp.__name__} {ocp.__version__} lacks {name}, with which checkpoints reach an object "
      "store: pip install orbax-checkpoint==0.12.8"
    )


def key_value_store(path: AnyPath) -> StoreSpec:
  """Return the TensorStore specification of the folder `path`."""
  if str(path).startswith((_GS, _S3)):
    open_object_stores()
    return gcs_utils.get_kvstore_for_gcs(f"{path}/")
  return {"driver": "file", "path": f"{path.absolute()}/"}


def _s3_store(uri: str) -> StoreSpec:
  """Return the TensorStore specification of an `s3://` folder."""
  bucket, _, path = uri.removeprefix(_S3).partition("/")
  spec = {"driver": "s3", "bucket": bucket, "path": path}
  return spec | _s3_options()


@functools.cache
def _s3_options() -> StoreSpec:
  """Return endpoint and kind of credentials, from where s3fs has found them."""
  options: StoreSpec = {}
  store = filesystem(_S3)
  store.connect()
  client = store.s3.meta
  if not client.endpoint_url.endswith(".amazonaws.com"):  # of AWS, TensorStore finds the region
    options["endpoint"] = client.endpoint_url
    options["aws_region"] = client.config.region_name or "us-east-1"
  if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise TensorStore logs all places without any
    options["aws_credentials"] = {"type": "environment"}
  return options
