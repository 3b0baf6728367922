"""The manifest of a checkpoint: what was saved, sealed by a digest."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

Manifest = dict[str, Any]  # {"body": {"leaves": ..., "data": ...}, "sha256": of the body}


def manifest_leaves(
  leaves: Mapping[str, Any], checksums: Mapping[str, int]
) -> dict[str, dict[str, Any]]:
  """Return {name: shape, dtype and checksum} for the arrays {name: leaf}."""
  return {
    name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": checksums[name]}
    for name, leaf in leaves.items()
  }


def seal_manifest(body: Mapping[str, Any]) -> Manifest:
  """Return the manifest with `body` and its SHA-256."""
  return {"body": dict(body), "sha256": _digest(body)}


def verify_manifest(manifest: Manifest) -> Manifest:
  """Return `manifest`; raise OSError if it is not what was written."""
  digest = _digest(manifest.get("body"))
  if digest != manifest.get("sha256"):
    raise OSError(f"its manifest is not what was written (SHA-256 {digest[:8]})")
  return manifest


def _digest(body: Any) -> str:
  return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
