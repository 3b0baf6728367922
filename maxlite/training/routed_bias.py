"""The routers' biases, which even out the load without a loss."""

import re
from typing import Any

import jax
import jax.numpy as jnp

from maxlite.optim.partition import path_of

BIAS = r"(^|/)router/bias$"


def move_routed_biases(params: Any, count_NE: jax.Array, rate: jax.Array) -> Any:
  """`params` with every router's bias moved by `rate`: up where an expert got too little.

  `count_NE` holds the assignments of the whole step by MoE layer, the first layer first; a bias is
  [E], or [N, E] of layers that are stacked.

  Source: Wang et al., Auxiliary-Loss-Free Load Balancing (2024), algorithm 1.
  """
  paths_and_leaves, tree = jax.tree_util.tree_flatten_with_path(params)
  leaves = [leaf for _, leaf in paths_and_leaves]
  paths = [path_of(key_path) for key_path, _ in paths_and_leaves]
  biases = sorted(
    (i for i, path in enumerate(paths) if re.search(BIAS, path)), key=lambda i: _order(paths[i])
  )
  num_experts = count_NE.shape[-1]
  assert sum(leaves[i].size for i in biases) == count_NE.size, [paths[i] for i in biases]
  step_NE = rate * jnp.sign(jnp.mean(count_NE, axis=-1, keepdims=True) - count_NE)
  first = 0
  for i in biases:
    last = first + leaves[i].size // num_experts
    leaves[i] += step_NE[first:last].reshape(leaves[i].shape).astype(leaves[i].dtype)
    first = last
  return jax.tree.unflatten(tree, leaves)


def _order(path: str) -> list[tuple[int, str]]:
  """Sorts paths as a reader would: layers_10 comes after layers_2."""
  return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]
