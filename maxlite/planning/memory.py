"""Memory of one device in a training step, by arithmetic on shapes; no compiler needed."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np


class MemoryEstimate(NamedTuple):
  """Bytes of one device."""

  parameters: float
  optimizer: float  # and the rest of the state
  saved_activations: float  # what the backward pass finds, under the model's remat policy
  gradients: float
  layer_activations: float  # what one layer keeps for its own backward pass
  layer_gradient: float  # of the widest of those
  layer_weights: float  # one layer's, gathered, and their gradients before they are scattered
  unembedding: float  # gathered, and its gradient, which waits for the update
  logits: float  # a chunk of them, and their gradient

  @property
  def temporaries(self) -> float:
    """The peak: in the loss no gradient is there yet, in the layers the logits are gone."""
    in_layers = self.gradients + self.layer_activations + self.layer_gradient + self.layer_weights
    return self.saved_activations + self.unembedding + max(self.logits, in_layers)

  @property
  def total(self) -> float:
    return self.parameters + self.optimizer + self.temporaries


def bytes_per_device(tree: Any) -> int:
  """Bytes of the shards that one device holds of ShapeDtypeStructs with shardings."""
  return sum(
    prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(tree)
  )


class Activation(NamedTuple):
  """One array that a forward pass keeps for its backward pass."""

  length: int  # of its leading axis: layers, where they are stacked
  num_bytes: float  # per shard


def activations(residuals_of: Callable[[int], Any], rows: int, num_shards: int) -> list[Activation]:
  """What a forward pass over `rows` rows keeps for its backward pass, but for weights.

  Args:
    residuals_of: rows -> pytree of the shapes that are kept, weights among them. Activations are
      what grows with the rows.
  """
  once, twice = (jax.tree.leaves(residuals_of(n)) for n in (rows, 2 * rows))
  grown = [
    Activation(leaf.shape[0], (_num_bytes(more) - _num_bytes(leaf)) / num_shards)
    for leaf, more in zip(once, twice, strict=True)
    if leaf.shape
  ]
  return [kept for kept in grown if kept.num_bytes]


def _num_bytes(leaf: Any) -> int:
  return prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
