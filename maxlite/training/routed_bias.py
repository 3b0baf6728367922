"""The routers' biases, which balance the experts' load without a loss."""

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig
from maxlite.optim.labels import paths_in
from maxlite.sharding.pytree import PyTree

BIAS = r"(^|/)router/bias$"


def build_routed_bias_update(cfg: MoeConfig) -> Callable[[PyTree, dict, jax.Array], PyTree] | None:
  """Build the step's `post_update` that moves routers' biases; None without `routed_bias`."""
  if not cfg.routed_bias:
    return None

  def update(params: PyTree, metrics: dict, finite: jax.Array) -> PyTree:
    rate = jnp.where(finite, cfg.routed_bias_update_rate, 0)
    return move_routed_biases(params, metrics["expert_load"], rate)

  return update


def move_routed_biases(params: PyTree, count_NE: jax.Array, rate: jax.Array) -> PyTree:
  """Move every router's bias by `rate`: up for experts with less than the mean load.

  Args:
    count_NE: assignments of the whole step by MoE layer, the first layer first. A bias is [E], or
      [N, E] in stacked layers.

  Source: Wang et al., Auxiliary-Loss-Free Load Balancing (2024), algorithm 1.
  """
  paths = paths_in(params)
  leaves, tree = jax.tree.flatten(params)
  biases = [i for i, path in enumerate(paths) if re.search(BIAS, path)]
  biases.sort(key=lambda i: _order(paths[i]))
  num_experts = count_NE.shape[-1]
  assert sum(leaves[i].size for i in biases) == count_NE.size, [paths[i] for i in biases]
  mean_N1 = jnp.mean(count_NE, axis=-1, keepdims=True)
  step_NE = rate * jnp.sign(mean_N1 - count_NE)
  first = 0
  for i in biases:
    last = first + leaves[i].size // num_experts
    leaves[i] += step_NE[first:last].reshape(leaves[i].shape).astype(leaves[i].dtype)
    first = last
  return jax.tree.unflatten(tree, leaves)


def _order(path: str) -> list[tuple[int, str]]:
  """Sort key with numbers in numeric order: layers_10 comes after layers_2."""
  key = []
  for part in re.split(r"(\d+)", path):
    if part.isdigit():
      key.append((int(part), ""))
    else:
      key.append((-1, part))
  return key
