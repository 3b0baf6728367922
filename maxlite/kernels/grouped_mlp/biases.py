"""The biases of a feed-forward network per group."""

from typing import NamedTuple

import jax


class Biases(NamedTuple):
  """One row per group for each projection."""

  bi_GF: tuple[jax.Array, ...]
  bo_GD: jax.Array
