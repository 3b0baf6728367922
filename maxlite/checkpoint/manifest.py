"""The manifest of a checkpoint: what was saved, sealed by a digest."""

import hashlib
import json
from collections.abc import Mapping
from typing import Protocol, TypeAlias

import numpy as np

from maxlite.storage.json_values import Json, JsonObject

Manifest: TypeAlias = JsonObject  # {"body": {"leaves": ..., "data": ...}, "sha256": digest}


class ArrayLike(Protocol):
  """An array, or the description of one."""

  @property
  def shape(self) -> tuple[int, ...]: ...

  @property
  def dtype(self) -> np.dtype: ...


def manifest_leaves(
  leaves: Mapping[str, ArrayLike],
  checksums: Mapping[str, int],
) -> dict[str, JsonObject]:
  """Return {name: shape, dtype and checksum} for the arrays {name: leaf}, as JSON values."""
  described = {}
  for name, leaf in leaves.items():
    described[name] = {
      "shape": list(leaf.shape),
      "dtype": str(leaf.dtype),
      "checksum": checksums[name],
    }
  return described


def seal_manifest(body: Mapping[str, Json]) -> Manifest:
  """Return the manifest with `body` and its SHA-256."""
  return {"body": dict(body), "sha256": _digest(body)}


def verify_manifest(manifest: Manifest) -> Manifest:
  """Return `manifest`; raise OSError if it is not what was written."""
  digest = _digest(manifest.get("body"))
  if digest != manifest.get("sha256"):
    raise OSError(f"its manifest is not what was written (SHA-256 {digest[:8]})")
  return manifest


def _digest(body: object) -> str:
  text = json.dumps(body, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()
