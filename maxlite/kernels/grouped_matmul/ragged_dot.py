"""XLA's ragged dot: native on TPU but for its weight gradient, dense in the groups elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: object
) -> jax.Array:
  """y_MF in x's type."""
  del tiles
  accumulate = np.promote_types(x_MD.dtype, np.float32)
  # XLA leaves open what becomes of rows past the last group, so they are cut off on both sides.
  live_M1 = (jnp.arange(x_MD.shape[0], dtype=jnp.int32) < group_sizes_G.sum(dtype=jnp.int32))[
    :, None
  ]
  y_MF = jax.lax.ragged_dot(
    jnp.where(live_M1, x_MD, 0),
    w_GDF.astype(x_MD.dtype),
    group_sizes_G,
    preferred_element_type=accumulate,
  )
  return jnp.where(live_M1, y_MF, 0).astype(x_MD.dtype)
