"""Draft heads for speculative decoding: extra heads on the decoder's last hidden state.

At position t the model's own head predicts the token at t + 1, and draft head j (from 0) the token
at t + 2 + j. Speculative decoding proposes these tokens and verifies them in one forward pass:

    variables = {"params": params}
    x_BTD, _ = model.apply(variables, tokens_BT, segment_BT, position_BT, method=model.hidden)
    logits_BTJV = model.apply(variables, x_BTD, method=model.draft_logits)

Axis `J` is the draft heads; x_BTD may be the last position only.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.layers.linear import matmul
from maxlite.layers.mlp import checkpointed_activation
from maxlite.layers.partitioned import partitioned
from maxlite.sharding import Sharder


class DraftHeads(nn.Module):
  """y_BTJD = x + silu(x w_j): hidden states for the model's own unembedding.

  All w_j are initialized to zero, so each head starts as a copy of the model's own.

  Source: Cai et al., Medusa (2024), section 2.1.1, but with a shared unembedding as in DeepSeek-AI,
  DeepSeek-V3 (2024), section 2.2.
  """

  num_heads: int
  weight_dtype: jnp.dtype
  sharder: Sharder

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    num_rows, num_positions, dim = x_BTD.shape
    init = partitioned(nn.initializers.zeros, ("layers", "embed", "mlp"))
    shape = (self.num_heads, dim, dim)
    w_JDF = self.param("kernel", init, shape, self.weight_dtype)
    multiply = jax.vmap(matmul, in_axes=(None, 0), out_axes=1)
    if self.sharder.num_shards("activation_length") > 1:
      # B and T, both sharded, cannot be merged into one axis without moving data.
      h_BTJD = jax.vmap(multiply, in_axes=(0, None))(x_BTD, w_JDF)
    else:
      h_TJD = multiply(x_BTD.reshape(-1, dim), w_JDF)  # Tokens of all rows.
      h_BTJD = h_TJD.reshape(num_rows, num_positions, self.num_heads, dim)
    names = ("activation_batch", "activation_length", None, "activation_embed")
    h_BTJD = checkpointed_activation(jax.nn.silu, True, (h_BTJD,))
    h_BTJD = self.sharder.constrain(h_BTJD, names)
    return x_BTD[..., None, :] + h_BTJD


def shift_left(x_BT: jax.Array, num_heads: int) -> jax.Array:
  """x_BTJ: for draft head j, the value 1 + j positions later, and 0 past the end of the row."""
  shifted = []
  for num_later in range(1, num_heads + 1):
    later = x_BT[:, num_later:]
    shifted.append(jnp.pad(later, ((0, 0), (0, num_later))))
  return jnp.stack(shifted, axis=-1)


def draft_weight(segment_BT: jax.Array, weight_BT: jax.Array, num_heads: int) -> jax.Array:
  """weight_BTJ of the token that draft head j predicts; 0 past the end of the document."""
  same_BTJ = shift_left(segment_BT, num_heads) == segment_BT[..., None]
  return jnp.where(same_BTJ, shift_left(weight_BT, num_heads), 0)
