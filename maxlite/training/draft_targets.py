"""Targets and weights of draft heads: head j predicts the token 2 + j positions ahead."""

import jax
import jax.numpy as jnp

from maxlite.data.batch import Batch


def shift_left(x_BT: jax.Array, num_heads: int) -> jax.Array:
  """x_BTJ: for draft head j, the value 1 + j positions later, and 0 past the end of the row."""
  shifted = (jnp.pad(x_BT[:, n:], ((0, 0), (0, n))) for n in range(1, num_heads + 1))
  return jnp.stack(list(shifted), axis=-1)


def draft_weight(batch: Batch, num_heads: int) -> jax.Array:
  """weight_BTJ of the token that draft head j predicts; 0 past the end of the document."""
  same_BTJ = shift_left(batch.segment_BT, num_heads) == batch.segment_BT[..., None]
  return jnp.where(same_BTJ, shift_left(batch.weight_BT, num_heads), 0)
