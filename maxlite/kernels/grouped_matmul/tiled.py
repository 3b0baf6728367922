"""Grouped matmul for CPUs, in plain JAX: work proportional to the rows, for any group sizes."""

import jax
import jax.numpy as jnp

from maxlite.kernels.grouped_matmul import row_tiles
from maxlite.kernels.grouped_matmul.gradient import GroupedKernels, grouped_matmul_of
from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES
from maxlite.kernels.numerics import accumulator_dtype, dot
from maxlite.kernels.xla_cpu import materialized_transpose, pack, unpack


def grouped_matmul(x_MD, w_GDF, group_sizes_G: jax.Array, tiles: object) -> jax.Array:
  """y_MF in x's type."""
  del tiles  # this backend's are fixed
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  kernels = GroupedKernels(_multiply_rows, _sum_outer_products)
  return grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, DEFAULT_TILES)


def _multiply_rows(x_MD, w_GDF, group_sizes_G, tile, transpose: bool) -> jax.Array:
  del tile
  w_axis = 1 if transpose else 0

  @jax.custom_batching.sequential_vmap
  def kernel(x_MD, w_GDF, group_sizes_G):
    dtype, bits_MD, num_rows = x_MD.dtype, pack(x_MD), x_MD.shape[0]

    def body(tile, matrices, y_MF):
      y_mF = dot(tile.read(bits_MD, dtype), unpack(matrices[0], dtype), (1, w_axis))
      return tile.write(y_MF, y_mF.astype(dtype))

    y_MF = jnp.zeros_like(bits_MD, shape=(num_rows, w_GDF.shape[2 - w_axis]))
    w_GDF = pack(w_GDF.astype(dtype))
    return unpack(row_tiles.for_tiles(body, y_MF, (w_GDF,), group_sizes_G, num_rows), dtype)

  return kernel(x_MD, w_GDF, group_sizes_G)


@jax.custom_batching.sequential_vmap
def _group_sums(x_MD, dy_MF, group_sizes_G) -> jax.Array:
  """dw_GDF in the accumulator type."""
  dtype = x_MD.dtype
  x_MD, dy_MF = pack(x_MD), pack(dy_MF)

  def body(tile, _, dw_GDF):
    x_Dm = materialized_transpose(tile.read(x_MD, dtype))
    return tile.add(dw_GDF, dot(x_Dm, tile.read(dy_MF, dtype), (1, 0)))

  shape = (group_sizes_G.shape[0], x_MD.shape[1], dy_MF.shape[1])
  dw_GDF = jnp.zeros_like(x_MD, shape=shape, dtype=accumulator_dtype(dtype))
  return row_tiles.for_tiles(body, dw_GDF, (), group_sizes_G, x_MD.shape[0])


def _sum_outer_products(x_MD, dy_MF, group_sizes_G, dtype, tile) -> jax.Array:
  del tile
  return _group_sums(x_MD, dy_MF, group_sizes_G).astype(dtype)
