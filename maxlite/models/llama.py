"""Llama: pre-norm grouped-query attention and a gated MLP.

Source: Touvron et al., LLaMA (2023), section 2.2; Llama 2 (2023) for grouped queries.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.attention import Attention
from maxlite.layers.mlp import MLP
from maxlite.layers.norm import RMSNorm
from maxlite.parallel import Sharder


def attention_of(cfg: ModelConfig, sharder: Sharder, name: str) -> Attention:
  """The attention layer that the Llama line of families shares."""
  return Attention(
    cfg.base_num_query_heads,
    cfg.base_num_kv_heads,
    cfg.head_dim,
    cfg.attention,
    cfg.attention_block_q,
    jnp.dtype(cfg.weight_dtype),
    sharder,
    name=name,
  )


def norm_of(cfg: ModelConfig, name: str) -> RMSNorm:
  return RMSNorm(cfg.normalization_layer_epsilon, jnp.dtype(cfg.weight_dtype), name=name)


class Block(nn.Module):
  """(y_BTD, {}): one decoder layer, and no sums to make losses of."""

  cfg: ModelConfig
  sharder: Sharder
  is_moe: ClassVar[bool] = False

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, segment_BT: jax.Array, rope: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, dict]:
    cfg = self.cfg
    attention = attention_of(cfg, self.sharder, "attention")
    x_BTD += attention(norm_of(cfg, "attention_norm")(x_BTD), segment_BT, rope)
    mlp = MLP(
      cfg.base_mlp_dim, cfg.mlp_activations, jnp.dtype(cfg.weight_dtype), self.sharder, name="mlp"
    )
    x_BTD += mlp(norm_of(cfg, "mlp_norm")(x_BTD))
    return x_BTD, {}
