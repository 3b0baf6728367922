"""The entries of members along the first axis of trees, and their metrics."""

from collections.abc import Container, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxlite.ensemble.engines.engine_base import Metrics, StackMetrics
from maxlite.sharding.pytree import PyTree

Rows = int | list[int] | np.ndarray | jax.Array  # the number of an entry, or several numbers


def take_row(tree: PyTree, row: Rows) -> PyTree:
  """Entry `row`, or the entries with these numbers, along the first axis of every array."""
  return jax.tree.map(lambda leaf: leaf[row], tree)


def stack_rows(trees: Sequence[PyTree]) -> PyTree:
  """The trees as one, with a new first axis."""

  def stack(*leaves: jax.Array) -> jax.Array:
    return jnp.stack(leaves)

  return jax.tree.map(stack, *trees)


def stacked_sharding(sharding: NamedSharding, axis: str | None) -> NamedSharding:
  """The sharding of stacked arrays, given that of the arrays.

  Args:
    axis: the mesh axis over which the new first axis is sharded; None: it is not.
  """
  return NamedSharding(sharding.mesh, jax.P(axis, *sharding.spec))


def join_metrics(by_member: Sequence[Metrics]) -> StackMetrics:
  """The metrics of members in separate programs."""
  by_group = [stack_rows([metrics]) for metrics in by_member]
  common = stack_common(by_group, range(len(by_member)))
  own = [metrics_besides(common, metrics) for metrics in by_member]
  return StackMetrics(common, own)


def stack_common(by_group: Sequence[Metrics], order_Z: Sequence[int]) -> Metrics:
  """The scalars [Z] that all members have, in the order of the members.

  Args:
    by_group: the metrics of every group, [members of the group, ...].
    order_Z: for every member, its position in the concatenated groups.
  """
  num_members = len(order_Z)
  is_ordered = list(order_Z) == list(range(num_members))
  common = {}
  for name in by_group[0]:
    values = [metrics[name] for metrics in by_group if name in metrics]
    if len(values) < len(by_group):
      continue
    if any(value.ndim != 1 for value in values):
      continue
    joined_Z = values[0]
    if len(values) > 1:
      joined_Z = jnp.concatenate(values)
    if not is_ordered:
      joined_Z = joined_Z[jnp.asarray(order_Z)]
    common[name] = joined_Z
  return common


def metrics_besides(common: Container[str], metrics: Metrics) -> Metrics:
  """The metrics whose names are not in `common`."""
  return {name: value for name, value in metrics.items() if name not in common}


def with_shardings(tree: PyTree, shardings: PyTree) -> PyTree:
  """Add shardings to the abstract arrays of a tree.

  Args:
    tree: of `jax.ShapeDtypeStruct`.
    shardings: a tree of shardings, of which each may stand for a whole subtree of `tree`; None:
      `tree` is returned as it is.
  """
  if shardings is None:
    return tree

  def shard_all(sharding: NamedSharding, part: PyTree) -> PyTree:
    def shard(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shard, part)

  return jax.tree.map(shard_all, shardings, tree)


def copy_tree(tree: PyTree) -> PyTree:
  return jax.tree.map(jnp.copy, tree)
