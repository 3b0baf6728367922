"""The experts of all MoE layers of a decoder as one array, from and to the collection `routes`."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.config.schema import ModelConfig
from maxlite.layers.moe.routes import EXPERTS
from maxlite.models.layer_stacks import layer_stacks, num_moe_layers
from maxlite.sharding.pytree import PyTree


def route_shape(cfg: ModelConfig) -> tuple[int, int]:
  """N MoE layers and K experts of a token in each: the last axes of `Batch.expert_BTNK`."""
  return num_moe_layers(cfg), cfg.moe.num_experts_per_tok


def split_routes(expert_BTNK: jax.Array, cfg: ModelConfig) -> PyTree:
  """The collection with which the routers of a decoder of `cfg` replay these experts."""
  expert_NBTK = jnp.moveaxis(expert_BTNK, 2, 0)
  flat = {}
  for path, layers in _layers_by_path(cfg).items():
    flat[path] = expert_NBTK[np.asarray(layers)]
    if not cfg.scan_layers:
      (flat[path],) = flat[path]
  return unflatten_dict(flat)


def stack_routes(collection: PyTree, cfg: ModelConfig) -> jax.Array:
  """expert_BTNK, N MoE layers in their order, of a collection that a decoder of `cfg` recorded."""
  flat = flatten_dict(collection)
  expert_by_layer: dict[int, jax.Array] = {}
  for path, layers in _layers_by_path(cfg).items():
    expert = flat[path]
    if not cfg.scan_layers:
      expert = expert[None]
    expert_by_layer.update(zip(layers, expert, strict=True))
  return jnp.stack([expert_by_layer[n] for n in range(len(expert_by_layer))], axis=2)


def _layers_by_path(cfg: ModelConfig) -> dict[tuple[str, ...], list[int]]:
  """By path of its experts, the MoE layers that a router is of: of scanned layers, several."""
  found: dict[tuple[str, ...], list[int]] = {}
  number = 0
  for stack in layer_stacks(cfg):
    for n, layer in enumerate(stack.layers):
      if not layer.feed_forward.has_experts:
        continue
      unit, place = divmod(n, stack.unit_size)
      name = stack.name if cfg.scan_layers else f"{stack.name}_{unit}"
      path = (name, *stack.unit[place : place + 1], "moe", "router", EXPERTS)
      found.setdefault(path, []).append(number)
      number += 1
  return found
