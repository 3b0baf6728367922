"""What a feed-forward network per group may have in addition to its matrices."""

from typing import NamedTuple

import jax


class Biases(NamedTuple):
  """One row per group for each projection."""

  bi_GF: tuple[jax.Array, ...]
  bo_GD: jax.Array


class Adapter(NamedTuple):
  """The two factors of a low-rank change of one matrix per group."""

  a_GDR: jax.Array
  b_GRF: jax.Array


class Adapters(NamedTuple):
  """The changes of the matrices: x wi becomes x wi + (x a) b."""

  wi: tuple[Adapter, ...]
  wo: Adapter
