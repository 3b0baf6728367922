"""Grouped matmul for CPUs, in plain JAX: work proportional to rows, whatever the groups."""

import functools

import jax
import jax.numpy as jnp

from maxlite.kernels.grouped_matmul import row_tiles
from maxlite.kernels.grouped_matmul.row_tiles import dot, pack, unpack


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: object
) -> jax.Array:
  """y_MF in x's type."""
  del tiles  # this backend's are fixed
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  return _grouped_matmul(x_MD, w_GDF, group_sizes_G)


@jax.custom_vjp
def _grouped_matmul(x_MD, w_GDF, group_sizes_G):
  return _multiply_rows(x_MD, w_GDF, group_sizes_G, contract=0)


def _forward(x_MD, w_GDF, group_sizes_G):
  return _grouped_matmul(x_MD, w_GDF, group_sizes_G), (x_MD, w_GDF, group_sizes_G)


def _backward(saved, dy_MF):
  x_MD, w_GDF, group_sizes_G = saved
  dx_MD = _multiply_rows(dy_MF, w_GDF, group_sizes_G, contract=1)
  dw_GDF = jax.custom_batching.sequential_vmap(_sum_outer_products)(x_MD, dy_MF, group_sizes_G)
  return dx_MD, dw_GDF.astype(w_GDF.dtype), None


_grouped_matmul.defvjp(_forward, _backward)


def _multiply_rows(x_MD, w_GDF, group_sizes_G, *, contract: int) -> jax.Array:
  """Rows times their group's matrix, of which axis `contract` is summed over."""
  kernel = functools.partial(_multiply_rows_kernel, contract=contract)
  return jax.custom_batching.sequential_vmap(kernel)(x_MD, w_GDF, group_sizes_G)


def _multiply_rows_kernel(x_MD, w_GDF, group_sizes_G, *, contract: int) -> jax.Array:
  dtype = x_MD.dtype
  bits_MD, num_rows = pack(x_MD), x_MD.shape[0]

  def body(tile, matrices, y_MF):
    (w_DF,) = matrices
    y_mF = dot(tile.read(bits_MD, dtype), unpack(w_DF, dtype), contract)
    return tile.write(y_MF, y_mF.astype(dtype))

  y_MF = jnp.zeros_like(bits_MD, shape=(num_rows, w_GDF.shape[2 - contract]))
  w_GDF = pack(w_GDF.astype(dtype))
  return unpack(row_tiles.for_tiles(body, y_MF, (w_GDF,), group_sizes_G, num_rows), dtype)


def _sum_outer_products(x_MD, dy_MF, group_sizes_G) -> jax.Array:
  """dw_GDF, per group the sum of its rows' outer products, in the accumulator's type."""
  dtype = x_MD.dtype
  x_MD, dy_MF = pack(x_MD), pack(dy_MF)

  def body(tile, _, dw_GDF):
    x_Dm = row_tiles.transpose(tile.read(x_MD, dtype))
    return tile.add(dw_GDF, dot(x_Dm, tile.read(dy_MF, dtype)))

  shape = (group_sizes_G.shape[0], x_MD.shape[1], dy_MF.shape[1])
  dw_GDF = jnp.zeros_like(x_MD, shape=shape, dtype=row_tiles.accumulator(dtype))
  return row_tiles.for_tiles(body, dw_GDF, (), group_sizes_G, x_MD.shape[0])
