"""Token embedding and output projection."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.partitioned import partitioned
from maxlite.sharding import ROWS, Sharder


class Embed(nn.Module):
  """x_BTD: the embeddings of tokens_BT; if the family scales them, multiplied by sqrt(D)."""

  cfg: ModelConfig
  sharder: Sharder

  def setup(self) -> None:
    values = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
    init = partitioned(values, ("vocab", "embed"))
    shape = (self.cfg.vocab_size, self.cfg.base_emb_dim)
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    self.embedding = self.param("embedding", init, shape, weight_dtype)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    # All-gathered along D first: for a lookup in a sharded table, XLA fully rematerializes x_BTD.
    table_VD = self.embedding.astype(self.cfg.dtype)
    table_VD = self.sharder.constrain(table_VD, ("vocab", None))
    x_BTD = jnp.take(table_VD, tokens_BT, axis=0, mode="clip")
    if self.cfg.family.scaled_embedding:
      scale = jnp.asarray(self.cfg.base_emb_dim**0.5, x_BTD.dtype)
      x_BTD = x_BTD * scale
    if self.cfg.embedding_multiplier != 1:
      x_BTD = x_BTD * jnp.asarray(self.cfg.embedding_multiplier, x_BTD.dtype)
    return self.sharder.constrain(x_BTD, (*ROWS, "activation_embed"))

  def unembedding(self) -> jax.Array:
    """w_DV: the table as the projection to logits."""
    return self.embedding.T


class Unembed(nn.Module):
  """w_DV: an output projection that is not tied to the embedding."""

  cfg: ModelConfig

  @nn.compact
  def __call__(self) -> jax.Array:
    values = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    init = partitioned(values, ("embed", "vocab"))
    shape = (self.cfg.base_emb_dim, self.cfg.vocab_size)
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    return self.param("kernel", init, shape, weight_dtype)
