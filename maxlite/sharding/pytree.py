"""The type of trees of arrays, and the comparison of their structures."""

from typing import Any

import jax

# Any tree of arrays, or of objects that describe arrays such as jax.ShapeDtypeStruct. The types of
# Python cannot express it.
PyTree = Any


def same_structure(left: PyTree, right: PyTree) -> bool:
  """Whether two trees differ in nothing but their leaves."""
  left_structure: object = jax.tree.structure(left)
  right_structure: object = jax.tree.structure(right)
  return left_structure == right_structure
