"""Per-layer embeddings: every layer has a small embedding of each token, and of its context."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.embed import take_rows
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.mlp import ACTIVATIONS
from maxlite.layers.norm import RMSNorm, build_norm
from maxlite.layers.partitioned import partitioned
from maxlite.sharding import ROWS, Sharder


class PerLayerEmbed(nn.Module):
  """Computes e_NBTP, the input that each layer has besides the residual stream.

  P is hidden_size_per_layer_input. The input is the token's row of a table, times sqrt(P), plus a
  projection of the token's embedding x_BTD, times 1 / sqrt(D) and normalised over P; the sum is
  divided by sqrt(2).

  Source: the code published with Gemma 4 (2026), which has it from Gemma 3n.
  """

  cfg: ModelConfig
  sharder: Sharder
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, tokens_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
    cfg = self.cfg
    width = cfg.cycle.hidden_size_per_layer_input
    num_layers = cfg.base_num_decoder_layers
    projection = self.linear(
      cfg,
      self.sharder,
      features=(num_layers, width),
      kernel_names=("embed", "per_layer", "mlp"),
      name="projection",
    )
    projected_BTNP = projection(x_BTD)
    projected_BTNP = projected_BTNP * jnp.asarray(cfg.base_emb_dim**-0.5, x_BTD.dtype)
    norm = RMSNorm(
      cfg.normalization_layer_epsilon, jnp.dtype(cfg.weight_dtype), name="projection_norm"
    )
    token_BTNP = self._lookup(tokens_BT, (num_layers, width))
    sum_BTNP = norm(projected_BTNP) + token_BTNP
    e_BTNP = sum_BTNP * jnp.asarray(2**-0.5, x_BTD.dtype)
    e_NBTP = jnp.moveaxis(e_BTNP, 2, 0)
    return self.sharder.constrain(e_NBTP, ("per_layer", *ROWS, "activation_mlp"))

  def _lookup(self, tokens_BT: jax.Array, features: tuple[int, int]) -> jax.Array:
    """The rows of the tokens, times sqrt(P)."""
    init = nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=2, out_axis=0)
    init = partitioned(init, ("vocab", "per_layer", "embed"))
    shape = (self.cfg.vocab_size, *features)
    table = self.param("embedding", init, shape, jnp.dtype(self.cfg.weight_dtype))
    # All-gathered along P first, for the same reason as in `Embed`.
    table_VNP = table.astype(self.cfg.dtype)
    table_VNP = self.sharder.constrain(table_VNP, ("vocab", "per_layer", None))
    rows_BTNP = take_rows(table_VNP.shape[0], table_VNP, tokens_BT)
    # Not yet sharded along P: `tensor` shards V here, and XLA would fully rematerialize the
    # gradient of the table to move it from P to V.
    rows_BTNP = self.sharder.constrain(rows_BTNP, (*ROWS, "per_layer", None))
    return rows_BTNP * jnp.asarray(features[1] ** 0.5, rows_BTNP.dtype)


class PerLayerInput(nn.Module):
  """y_BTD: what the layer's input e_BTP adds to the residual stream x_BTD, which gates it."""

  cfg: ModelConfig
  sharder: Sharder
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, e_BTP: jax.Array) -> jax.Array:
    cfg = self.cfg
    gate = self.linear(
      cfg,
      self.sharder,
      features=e_BTP.shape[-1:],
      kernel_names=("embed", "mlp"),
      name="gate",
    )
    activate = ACTIVATIONS[cfg.mlp_activations[0]]
    gate_BTP = self.sharder.constrain(gate(x_BTD), (*ROWS, "activation_mlp"))
    gated_BTP = activate(gate_BTP) * e_BTP
    out = self.linear(
      cfg,
      self.sharder,
      features=x_BTD.shape[-1:],
      kernel_names=("mlp", "embed"),
      name="projection",
    )
    y_BTD = self.sharder.constrain(out(gated_BTP), (*ROWS, "activation_embed"))
    return build_norm(cfg, "norm")(y_BTD)
