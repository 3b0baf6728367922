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


class SharedKeysValues(NamedTuple):
  """The keys and values of the last layers that have their own, for all layers after them."""

  local_layer: KeysValues
  global_layer: KeysValues

  def of_layer(self, is_local: bool) -> KeysValues:
    """The keys and values for a layer that attends locally, or for one that attends globally."""
    if is_local:
      return self.local_layer
    return self.global_layer


def last_of_stack(stacked: SharedKeysValues | None) -> SharedKeysValues | None:
  """The last element, along the leading axis, of the keys and values of a stack of layers."""
  return jax.tree.map(lambda leaf: leaf[-1], stacked)
