"""Trees of arrays as bytes, for other processes and for files; reading them runs no code."""

from typing import Any

import jax
from flax import serialization

from maxlite.config.errors import UserError


def to_bytes(tree: Any) -> bytes:
  """Bytes of a tree of dicts, lists and tuples with arrays, numbers, strings and None.

  Raises:
    UserError: the tree holds anything else.
  """
  leaves, structure = jax.tree.flatten(tree)
  by_index = {str(n): leaf for n, leaf in enumerate(leaves)}  # flax splits large arrays in dicts
  try:
    content = {"structure": structure.serialize_using_proto(), "leaves": by_index}
    return serialization.msgpack_serialize(content, in_place=True)
  except (TypeError, ValueError) as error:
    raise UserError(
      "a tree cannot be sent to another process; use arrays in dicts (with strings as keys), "
      f"lists and tuples ({error})"
    ) from error


def from_bytes(data: bytes) -> Any:
  """The tree, with NumPy arrays."""
  content = serialization.msgpack_restore(data)
  registry = jax.tree_util.default_registry
  structure = jax.tree_util.PyTreeDef.deserialize_using_proto(registry, content["structure"])
  return jax.tree.unflatten(structure, content["leaves"].values())
