"""What an entry of `maxlite.registry.GROUPED_MLP_BACKENDS` states about its implementation."""

import dataclasses
from collections.abc import Callable

import jax


@dataclasses.dataclass(frozen=True)
class GroupedMlpBackend:
  """A whole feed-forward network for one backend of grouped matmul."""

  # (x_M, weight_M, wi_GDF, wo_GFD, biases, group_sizes_G, activation, wi_tiles, wo_tiles) -> y_M
  run: Callable[..., jax.Array]
  has_biases: bool = True
