"""`jax.lax.ragged_dot`: native on TPU except for the weight gradient; elsewhere dense in groups."""

import jax
import jax.numpy as jnp

from maxlite.kernels.numerics import accumulator_dtype


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: object
) -> jax.Array:
  """y_MF in x's type."""
  del tiles
  dtype = x_MD.dtype
  row_M = jnp.arange(x_MD.shape[0], dtype=jnp.int32)
  live_M1 = (row_M < group_sizes_G.sum(dtype=jnp.int32))[:, None]
  # XLA does not define the rows past the last group, so they are masked on both sides.
  y_MF = jax.lax.ragged_dot(
    jnp.where(live_M1, x_MD, 0),
    w_GDF.astype(dtype),
    group_sizes_G,
    preferred_element_type=accumulator_dtype(dtype),
  )
  return jnp.where(live_M1, y_MF, 0).astype(dtype)
