"""Trees of arrays as bytes, for other processes and for files; reading them runs no code."""

from typing import Any

import jax
from flax import serialization

from maxlite.config.errors import UserError


def to_bytes(tree: Any) -> bytes:
  """Bytes of a tree of dicts, lists and tuples with arrays, random keys, numbers, strings and None.

  Raises:
    UserError: the tree holds anything else.
  """
  leaves, structure = jax.tree.flatten(tree)
  by_index = {str(n): leaf for n, leaf in enumerate(leaves)}  # flax splits large arrays in dicts
  keys = {n: str(jax.random.key_impl(leaf)) for n, leaf in by_index.items() if _is_key(leaf)}
  by_index |= {n: jax.random.key_data(by_index[n]) for n in keys}
  try:
    content = {"structure": structure.serialize_using_proto(), "leaves": by_index, "keys": keys}
    return serialization.msgpack_serialize(content, in_place=True)
  except (TypeError, ValueError) as error:
    raise UserError(
      "a tree cannot be sent to another process; use arrays in dicts (with strings as keys), "
      f"lists and tuples ({error})"
    ) from error


def from_bytes(data: bytes) -> Any:
  """The tree, with NumPy arrays and random keys."""
  content = serialization.msgpack_restore(data)
  registry = jax.tree_util.default_registry
  structure = jax.tree_util.PyTreeDef.deserialize_using_proto(registry, content["structure"])
  leaves, keys = content["leaves"], content["keys"]
  leaves |= {n: jax.random.wrap_key_data(leaves[n], impl=impl) for n, impl in keys.items()}
  return jax.tree.unflatten(structure, leaves.values())


def _is_key(leaf: Any) -> bool:
  return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
