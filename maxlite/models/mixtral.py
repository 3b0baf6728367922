"""Mixtral: Llama with a mixture of experts in place of the MLP.

Source: Jiang et al., Mixtral of Experts (2024), section 2.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.moe.block import MoeBlock
from maxlite.layers.moe.router import RouterSums
from maxlite.models.llama import attention_of, norm_of
from maxlite.parallel import Sharder


class Block(nn.Module):
  """(y_BTD, {"moe": RouterSums}): one decoder layer and its router's sums."""

  cfg: ModelConfig
  sharder: Sharder
  is_moe: ClassVar[bool] = True

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, segment_BT: jax.Array, rope: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, dict[str, RouterSums]]:
    cfg = self.cfg
    attention = attention_of(cfg, self.sharder, "attention")
    x_BTD += attention(norm_of(cfg, "attention_norm")(x_BTD), segment_BT, rope)
    moe = MoeBlock(
      cfg.moe, cfg.mlp_activations, jnp.dtype(cfg.weight_dtype), self.sharder, name="moe"
    )
    y_BTD, sums = moe(norm_of(cfg, "moe_norm")(x_BTD), segment_BT)
    return x_BTD + y_BTD, {"moe": sums}
