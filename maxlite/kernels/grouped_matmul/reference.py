"""Reference implementation: every row times every matrix, masked to the row's own group."""

import jax
import jax.numpy as jnp

from maxlite.kernels.numerics import accumulator_dtype


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: object
) -> jax.Array:
  """y_MF in x's type; work and memory grow with the number of groups."""
  del tiles
  dtype = accumulator_dtype(x_MD.dtype)
  ends_G1 = jnp.cumsum(group_sizes_G)[:, None]
  starts_G1 = ends_G1 - group_sizes_G[:, None]
  row_1M = jnp.arange(x_MD.shape[0], dtype=jnp.int32)[None, :]
  in_group_GM1 = ((row_1M >= starts_G1) & (row_1M < ends_G1))[:, :, None]
  # Masked on both sides: 0 * inf from other groups' rows or matrices would be NaN.
  x_GMD = jnp.where(in_group_GM1, x_MD.astype(dtype)[None], 0)
  y_GMF = jnp.matmul(x_GMD, w_GDF.astype(dtype), precision="highest")
  return jnp.where(in_group_GM1, y_GMF, 0).sum(0).astype(x_MD.dtype)
