"""Token embedding and output projection."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.sharding import Sharder


class Embed(nn.Module):
  """x_BTD: the embeddings of tokens_BT; with `scaled`, multiplied by sqrt(emb_dim)."""

  vocab_size: int
  emb_dim: int
  dtype: jnp.dtype
  weight_dtype: jnp.dtype
  sharder: Sharder
  scaled: bool = False

  def setup(self) -> None:
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
    init = nn.with_logical_partitioning(init, ("vocab", "embed"))
    shape = (self.vocab_size, self.emb_dim)
    self.embedding = self.param("embedding", init, shape, self.weight_dtype)

  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    # All-gathered along D first: for a lookup in a sharded table, XLA fully rematerializes x_BTD.
    table_VD = self.sharder.constrain(self.embedding.astype(self.dtype), ("vocab", None))
    x_BTD = jnp.take(table_VD, tokens_BT, axis=0, mode="clip")
    x_BTD = x_BTD * jnp.asarray(self.emb_dim**0.5, x_BTD.dtype) if self.scaled else x_BTD
    names = ("activation_batch", "activation_length", "activation_embed")
    return self.sharder.constrain(x_BTD, names)

  def unembedding(self) -> jax.Array:
    """w_DV: the table as the projection to logits."""
    return self.embedding.T


class Unembed(nn.Module):
  """w_DV: an output projection that is not tied to the embedding."""

  vocab_size: int
  emb_dim: int
  weight_dtype: jnp.dtype

  @nn.compact
  def __call__(self) -> jax.Array:
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    init = nn.with_logical_partitioning(init, ("embed", "vocab"))
    return self.param("kernel", init, (self.emb_dim, self.vocab_size), self.weight_dtype)
