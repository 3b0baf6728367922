"""Units of dense layers followed by an MoE layer."""

from typing import Any

import jax
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.models.decoder_layer import DecoderLayer, Rope
from maxlite.models.remat import remat
from maxlite.sharding import Sharder


def _at(is_local: Any, index: int) -> Any:
  return None if is_local is None else is_local[index]


class InterleavedLayers(nn.Module):
  """interleave_moe_layer_step - 1 dense layers, then an MoE layer.

  Returns (y_BTD, sums of the MoE layer).
  """

  cfg: ModelConfig
  sharder: Sharder

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, segment_BT: jax.Array, rope: Rope, is_local: Any
  ) -> tuple[jax.Array, Any]:
    """`is_local` has one element per layer, or is None."""
    layer = remat(DecoderLayer, self.cfg)
    for i in range(self.cfg.moe.interleave_moe_layer_step - 1):
      dense = layer(self.cfg, self.sharder, moe=False, name=f"dense_{i}")
      x_BTD, _ = dense(x_BTD, segment_BT, rope, _at(is_local, i))
    mixture = layer(self.cfg, self.sharder, moe=True, name="mixture")
    return mixture(x_BTD, segment_BT, rope, _at(is_local, -1))
