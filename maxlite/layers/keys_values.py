"""The keys and values of a layer, to which other layers may attend too."""

from typing import NamedTuple

import jax

from maxlite.kernels.attention.cached import BlockMask
from maxlite.layers.cache import Blocks


class RowKeysValues(NamedTuple):
  """Keys and values of all positions of the rows."""

  k_BTGC: jax.Array
  v_BTGC: jax.Array


class CachedKeysValues(NamedTuple):
  """The blocks of a cache."""

  k_blocks: Blocks
  v_blocks: Blocks
  masks: list[BlockMask]  # Of each block.


KeysValues = RowKeysValues | CachedKeysValues  # What the queries of a layer attend to.
