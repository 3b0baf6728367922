"""Trees of arrays as bytes, for other processes and for files; reading them runs no code."""

from typing import Any

import jax
from flax import serialization

from maxlite.errors import UserError
from maxlite.sharding.pytree import PyTree


def to_bytes(tree: PyTree) -> bytes:
  """Bytes of a tree of dicts, lists and tuples with arrays, random keys, numbers, strings and None.

  Raises:
    UserError: the tree holds anything else.
  """
  structure: Any  # the type of `PyTreeDef` lacks its methods of serialization
  leaves, structure = jax.tree.flatten(tree)
  by_index = {}  # a dict, because Flax splits large arrays in dicts only
  implementations = {}  # of the leaves that are random keys
  for n, leaf in enumerate(leaves):
    if _is_key(leaf):
      implementations[str(n)] = str(jax.random.key_impl(leaf))
      leaf_data = jax.random.key_data(leaf)
    else:
      leaf_data = leaf
    by_index[str(n)] = leaf_data
  try:
    content = {
      "structure": structure.serialize_using_proto(),
      "leaves": by_index,
      "keys": implementations,
    }
    return serialization.msgpack_serialize(content, in_place=True)
  except (TypeError, ValueError) as error:
    raise UserError(
      "a tree cannot be sent to another process; use arrays in dicts (with strings as keys), "
      f"lists and tuples ({error})"
    ) from error


def from_bytes(data: bytes) -> PyTree:
  """The tree, with NumPy arrays and random keys."""
  content = serialization.msgpack_restore(data)
  structure = jax.tree_util.PyTreeDef.deserialize_using_proto(
    jax.tree_util.default_registry,
    content["structure"],
  )
  leaves = content["leaves"]
  for n, impl in content["keys"].items():
    leaves[n] = jax.random.wrap_key_data(leaves[n], impl=impl)
  return jax.tree.unflatten(structure, leaves.values())


def _is_key(leaf: object) -> bool:
  """Whether a leaf is an array of typed random keys."""
  return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
