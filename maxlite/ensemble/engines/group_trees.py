"""Parts of trees: parameters by path, and the entries of members along the first axis."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.ensemble.engines.engine_base import StackMetrics, stack_common


def without_paths(params: Any, paths: frozenset[str]) -> Any:
  """The parameters except those at `paths`."""
  flat = flatten_dict(params, sep="/")
  return unflatten_dict({path: x for path, x in flat.items() if path not in paths}, sep="/")


def only_paths(params: Any, paths: frozenset[str]) -> Any:
  """The parameters at `paths`."""
  flat = flatten_dict(params, sep="/")
  return unflatten_dict({path: x for path, x in flat.items() if path in paths}, sep="/")


def merge_params(own: Any, shared: Any) -> Any:
  """All parameters from two parts of them."""
  return unflatten_dict(flatten_dict(own) | flatten_dict(shared))


def take_row(tree: Any, row: int | jax.Array) -> Any:
  """Entry `row` along the first axis of every array."""
  return jax.tree.map(lambda leaf: leaf[row], tree)


def stack_rows(trees: Sequence[Any]) -> Any:
  """The trees as one, with a new first axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def join_metrics(by_member: Sequence[dict]) -> StackMetrics:
  """The metrics of members in separate programs."""
  by_group = [stack_rows([metrics]) for metrics in by_member]
  common = stack_common(by_group, range(len(by_member)))
  own = [{name: x for name, x in each.items() if name not in common} for each in by_member]
  return StackMetrics(common, own)
