"""Trees of arrays as bytes, for other processes and for files; nothing in them can run."""

from typing import Any

import jax
import numpy as np
from flax import serialization

from maxlite.config.errors import UserError

_SEQUENCES = {"list()": list, "tuple()": tuple}


def to_bytes(tree: Any) -> bytes:
  """Arrays, numbers, texts and None in dicts, lists and tuples.

  Raises:
    UserError: the tree holds something else.
  """
  return serialization.msgpack_serialize(_plain(tree), in_place=True)


def from_bytes(data: bytes) -> Any:
  """The tree again, with NumPy arrays."""
  return _tree(serialization.msgpack_restore(data))


def _plain(tree: Any) -> Any:
  if type(tree) is dict and all(isinstance(key, str) for key in tree):
    return {key: _plain(value) for key, value in tree.items()}
  for name, kind in _SEQUENCES.items():
    if type(tree) is kind:
      return {name: {str(place): _plain(value) for place, value in enumerate(tree)}}
  if isinstance(tree, jax.Array | np.ndarray | np.generic):
    return np.asarray(tree)
  if tree is None or type(tree) in (bool, int, float, str):
    return tree
  raise UserError(
    f"a {type(tree).__name__} cannot be sent to another process; use arrays in dicts (with names "
    "as keys), lists and tuples"
  )


def _tree(plain: Any) -> Any:
  if not isinstance(plain, dict):
    return plain
  for name, kind in _SEQUENCES.items():
    if list(plain) == [name]:
      return kind(_tree(plain[name][str(place)]) for place in range(len(plain[name])))
  return {key: _tree(value) for key, value in plain.items()}
