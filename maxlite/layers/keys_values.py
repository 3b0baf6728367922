"""The keys and values of a layer, to which other layers may attend too."""

from typing import Any, NamedTuple

import jax

from maxlite.kernels.attention.cached import BlockMask
from maxlite.layers.cache import Blocks


class KeysValues(NamedTuple):
  """What queries attend to: all positions of their rows, or the blocks of a cache."""

  k: jax.Array | Blocks  # k_BTGC of rows, or blocks k_BGSC.
  v: jax.Array | Blocks
  masks: list[BlockMask] | None = None  # Of each block; None: whole rows.


class SharedKeysValues(NamedTuple):
  """The keys and values of the last layers that have their own, for all layers after them."""

  local_layer: KeysValues
  global_layer: KeysValues

  def of_layer(self, is_local: bool) -> KeysValues:
    """Those of the layer that attends locally, or globally."""
    if is_local:
      return self.local_layer
    return self.global_layer


def last_of_stack(stacked: Any) -> Any:
  """The last element, along the leading axis, of everything in a stack of layers' outputs."""
  return jax.tree.map(lambda leaf: leaf[-1], stacked)
