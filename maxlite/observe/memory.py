"""Memory of one device in a training step, by arithmetic on shapes; no compiler needed."""

from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np


class Activations(NamedTuple):
  """Bytes that the backward pass finds, of one device."""

  saved: float  # under the model's own remat policy
  layer: float  # of one layer that keeps all


class MemoryEstimate(NamedTuple):
  """Bytes of one device."""

  parameters: float
  optimizer: float  # and the rest of the state
  gradients: float
  saved_activations: float
  layer: float  # while the backward pass is in the largest layer: activations, weights, gradients
  logits: float  # while it is in the loss

  @property
  def temporaries(self) -> float:
    """The peak: the loss comes before the first gradient, the layers before the last."""
    return self.saved_activations + max(self.logits, self.gradients + self.layer)

  @property
  def total(self) -> float:
    return self.parameters + self.optimizer + self.temporaries


def bytes_per_device(tree: Any) -> int:
  """Bytes of the shards that one device holds of ShapeDtypeStructs with shardings."""
  return sum(
    prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
    for leaf in jax.tree.leaves(tree)
  )


def activation_bytes(residuals_of: Any, rows: int, num_shards: int) -> float:
  """Bytes that a forward pass over `rows` rows keeps for its backward pass, per shard.

  Args:
    residuals_of: rows -> pytree of the shapes that are kept, weights among them. Activations are
      what grows with the rows.
  """
  once, twice = (_num_bytes(residuals_of(n)) for n in (rows, 2 * rows))
  return (twice - once) / num_shards


def _num_bytes(tree: Any) -> int:
  return sum(prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))
