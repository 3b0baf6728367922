"""The indexer of sparse attention: what it scores keys by, and its loss."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.layer_specs import IndexedAttentionSpec
from maxlite.layers.linear import Linear
from maxlite.layers.norm import LayerNorm
from maxlite.layers.rope import RopeTables, apply_rope, deinterleave
from maxlite.sharding import Sharder

EPSILON = 1e-6  # of the norm of keys, independent of the epsilon of the other norms


class Index(NamedTuple):
  """The operands of the indexer's scores (kernels/attention/indexed.py)."""

  q_BTIC: jax.Array
  k_BTC: jax.Array
  weight_BTI: jax.Array  # in the accumulator's type


class IndexerSums(struct.PyTreeNode):
  """Sums over the tokens of a batch, float32."""

  tokens: jax.Array
  # Of the indexer's distribution over keys from that of attention [nats].
  divergence: jax.Array


def indexer_loss(sums_N: IndexerSums) -> jax.Array:
  """The mean over layers of the mean divergence per token [nats].

  Source: DeepSeek-AI, DeepSeek-V3.2 (2025), eq. 3 and 4, which state the sum over tokens.
  """
  return jnp.mean(sums_N.divergence / jnp.maximum(sums_N.tokens, 1))


class Indexer(nn.Module):
  """Queries of several heads, a key that they share, and a weight of each head, per position.

  The first channels of queries and keys rotate, as many as in attention. No gradient leaves it for
  its inputs. It has no adapters, and every device has all of its heads.

  Source: DeepSeek-AI, DeepSeek-V3.2 (2025), section 2.1; norm, rotation and factors are those of
  the code published with it.
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: IndexedAttentionSpec

  @nn.compact
  def __call__(self, x_BTD: jax.Array, latent_BTQ: jax.Array, rope: RopeTables) -> Index:
    """
    Args:
      x_BTD: the input of attention.
      latent_BTQ: the latent of its queries.
      rope: as of its queries and keys.
    """
    x_BTD, latent_BTQ = jax.lax.stop_gradient((x_BTD, latent_BTQ))
    num_heads, num_channels = self.spec.num_index_heads, self.spec.index_channels
    query = Linear(
      self.cfg,
      self.sharder,
      features=(num_heads, num_channels),
      kernel_names=("q_lora", "index_heads", "kv"),
      name="query",
    )
    key = Linear(
      self.cfg,
      self.sharder,
      features=(num_channels,),
      kernel_names=("embed", "kv"),
      name="key",
    )
    # Computed in the accumulator's type, also from narrow inputs.
    head_weights = Linear(
      self.cfg,
      self.sharder,
      features=(num_heads,),
      kernel_names=("embed", "index_heads"),
      is_quantized=False,
      name="head_weights",
    )
    key_norm = LayerNorm(EPSILON, jnp.dtype(self.cfg.weight_dtype), name="key_norm")
    q_BTIC = self._rotate(query(latent_BTQ), rope)
    k_BTC = self._rotate(key_norm(key(x_BTD))[:, :, None], rope)[:, :, 0]
    weight_BTI = head_weights(x_BTD.astype(accumulator_dtype(x_BTD.dtype)))
    return Index(q_BTIC, k_BTC, weight_BTI * (num_heads * num_channels) ** -0.5)

  def _rotate(self, x_BTIC: jax.Array, rope: RopeTables) -> jax.Array:
    """The rotary embedding of the first channels; the order of channels is that of `apply_rope`."""
    if self.spec.interleaved:
      num_rotated = 2 * rope.cos_BTC.shape[-1]
      pairs, others = jnp.split(x_BTIC, [num_rotated], axis=-1)
      x_BTIC = jnp.concatenate([deinterleave(pairs), others], axis=-1)
    return apply_rope(x_BTIC, rope.cos_BTC, rope.sin_BTC)
