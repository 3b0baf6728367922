"""Comparisons and combinations of whole pytrees of arrays."""

from collections.abc import Sequence

import jax
import numpy as np


def leaf_pairs(first: object, second: object) -> list[tuple]:
  """The leaves of two trees at the same places; an error if one tree has more."""
  return list(zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


def assert_equal_leaves(got: object, want: object) -> None:
  """Assert that two trees have the same structure and equal leaves, bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))


def stack(trees: Sequence[object]) -> object:
  """One tree, whose leaves are those of `trees` along a new first axis."""

  def stack_leaves(*leaves: object) -> np.ndarray:
    return np.stack(leaves)

  return jax.tree.map(stack_leaves, *trees)


def concatenate(trees: Sequence[object]) -> object:
  """One tree, whose leaves are those of `trees` along their first axis."""

  def concatenate_leaves(*leaves: object) -> np.ndarray:
    return np.concatenate(leaves)

  return jax.tree.map(concatenate_leaves, *trees)
