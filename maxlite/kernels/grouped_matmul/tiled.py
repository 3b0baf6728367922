"""Grouped matmul for CPUs, in plain JAX: work proportional to rows, whatever the groups.

A loop over the groups, and in it one over tiles of rows. Most rows go by in large tiles that lie
whole within their group. What is left of a group is covered by smaller tiles that may reach beyond
it; there, the rows of others are masked.

XLA:CPU multiplies bfloat16 in hardware only where a dot's result is float32 and its left operand
contracts its last axis, and it converts any bfloat16 array that a loop carries at every turn. Hence
the form of `_dot`, the transposed tile in `_weight_gradient`, and `_pack`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_LARGE_TILE = 512
_SMALL_TILE = 64
_HEAD_TILES = (32, 64, 128, 256, _LARGE_TILE)

_slice_rows = jax.lax.dynamic_slice_in_dim
_write_rows = functools.partial(jax.lax.dynamic_update_slice_in_dim, axis=0)


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: object
) -> jax.Array:
  """y_MF in x's type."""
  del tiles  # this backend's are fixed
  return _grouped_matmul(x_MD, w_GDF, group_sizes_G)


@jax.custom_vjp
def _grouped_matmul(x_MD, w_GDF, group_sizes_G):
  return _multiply_rows(x_MD, w_GDF, group_sizes_G, contract=0)


def _forward(x_MD, w_GDF, group_sizes_G):
  return _grouped_matmul(x_MD, w_GDF, group_sizes_G), (x_MD, w_GDF, group_sizes_G)


def _backward(saved, dy_MF):
  x_MD, w_GDF, group_sizes_G = saved
  dx_MD = _multiply_rows(dy_MF, w_GDF, group_sizes_G, contract=1)
  dw_GDF = _sum_outer_products(x_MD, dy_MF, group_sizes_G, w_GDF.dtype)
  return dx_MD, dw_GDF, None


_grouped_matmul.defvjp(_forward, _backward)


def _multiply_rows(x_MD, w_GDF, group_sizes_G, *, contract: int) -> jax.Array:
  """Rows times their group's matrix, of which axis `contract` is summed over."""
  dtype = x_MD.dtype
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2 - contract]))
  kernel = functools.partial(_multiply_rows_kernel, dtype=dtype, contract=contract)
  operands = _pack(x_MD), _pack(w_GDF.astype(dtype)), group_sizes_G
  return _unpack(jax.custom_batching.sequential_vmap(kernel)(*operands), dtype)


def _sum_outer_products(x_MD, dy_MF, group_sizes_G, dtype: jnp.dtype) -> jax.Array:
  """Per group the sum of its rows' outer products, in `dtype`."""
  if x_MD.size == 0:
    shape = (group_sizes_G.shape[0], x_MD.shape[1], dy_MF.shape[1])
    return jnp.zeros_like(x_MD, shape=shape, dtype=dtype)
  kernel = functools.partial(_outer_products_kernel, row_dtype=x_MD.dtype, dtype=dtype)
  operands = _pack(x_MD), _pack(dy_MF), group_sizes_G
  return _unpack(jax.custom_batching.sequential_vmap(kernel)(*operands), dtype)


def _multiply_rows_kernel(x_MD, w_GDF, group_sizes_G, *, dtype, contract: int) -> jax.Array:
  starts_G, ends_G = _bounds(group_sizes_G)

  def fill_group(group, y_MF):
    w_DF = _unpack(jax.lax.dynamic_index_in_dim(w_GDF, group, keepdims=False), dtype)

    def product(row, num):
      y_mF = _dot(_unpack(_slice_rows(x_MD, row, num), dtype), w_DF, contract)
      return _pack(y_mF.astype(dtype))

    return _fill_rows(y_MF, starts_G[group], ends_G[group], product)

  y_MF = jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2 - contract]))
  return jax.lax.fori_loop(0, w_GDF.shape[0], fill_group, y_MF)


def _fill_rows(y_MF, start, end, product: Callable[..., jax.Array]) -> jax.Array:
  """y_MF with rows [start, end) replaced by those of `product(row, num)`."""
  num_rows = y_MF.shape[0]
  small = min(_SMALL_TILE, num_rows)
  middle = end - (end - start) % _LARGE_TILE

  def large_tile(row, y_MF):
    return _write_rows(y_MF, product(row, _LARGE_TILE), row)

  def small_tile(row, y_MF):
    mine_m1 = _mine(row, end, small, num_rows)
    y_mF = jnp.where(mine_m1, product(row, small), _slice_rows(y_MF, row, small))
    return _write_rows(y_MF, y_mF, row)

  if num_rows >= _LARGE_TILE:
    y_MF = _for_tiles(start, middle, _LARGE_TILE, large_tile, y_MF)
  return _for_tiles(middle, end, small, small_tile, y_MF)


def _outer_products_kernel(x_MD, dy_MF, group_sizes_G, *, row_dtype, dtype) -> jax.Array:
  starts_G, ends_G = _bounds(group_sizes_G)

  def sum_group(group, dw_GDF):
    dw_DF = _sum_rows(x_MD, dy_MF, starts_G[group], ends_G[group], row_dtype)
    return jax.lax.dynamic_update_index_in_dim(dw_GDF, _pack(dw_DF.astype(dtype)), group, 0)

  shape = (group_sizes_G.shape[0], x_MD.shape[1], dy_MF.shape[1])
  dw_GDF = jnp.zeros_like(x_MD, shape=shape, dtype=_packed(dtype))
  return jax.lax.fori_loop(0, group_sizes_G.shape[0], sum_group, dw_GDF)


def _sum_rows(x_MD, dy_MF, start, end, dtype) -> jax.Array:
  """dw_DF, the sum over rows [start, end) of the outer products, in the accumulator's type."""
  num_rows = x_MD.shape[0]
  tiles = tuple(tile for tile in _HEAD_TILES if tile < num_rows) or (num_rows,)
  middle = start + (end - start) % tiles[-1]

  def head(tile):
    mine_m1 = _mine(start, middle, tile, num_rows)
    # Masked on both sides: a row beyond the group may hold NaN, and 0 * NaN is NaN.
    x_mD, dy_mF = (jnp.where(mine_m1, _slice_rows(a, start, tile), 0) for a in (x_MD, dy_MF))
    return _dot(_unpack(x_mD, dtype).T, _unpack(dy_mF, dtype), 0)

  def large_tile(row, dw_DF):
    x_mD, dy_mF = (_unpack(_slice_rows(a, row, tiles[-1]), dtype) for a in (x_MD, dy_MF))
    return dw_DF + _dot(x_mD.T, dy_mF, 0)

  # The head starts the sum, in the smallest tile that holds it: no pass over zeros, no addition.
  smallest = sum((middle - start > tile).astype(jnp.int32) for tile in tiles[:-1])
  dw_DF = jax.lax.switch(smallest, [functools.partial(head, tile) for tile in tiles])
  return _for_tiles(middle, end, tiles[-1], large_tile, dw_DF)


def _bounds(group_sizes_G: jax.Array) -> tuple[jax.Array, jax.Array]:
  """First row of each group, and the first past it."""
  ends_G = jnp.cumsum(group_sizes_G)
  return ends_G - group_sizes_G, ends_G


def _for_tiles(start, end, tile: int, body: Callable[..., jax.Array], carry) -> jax.Array:
  """`carry` after `body(row, carry)` for each tile's first row."""

  def advance(state):
    return state[0] + tile, body(*state)

  return jax.lax.while_loop(lambda state: state[0] < end, advance, (start, carry))[1]


def _mine(start, end, tile: int, num_rows: int) -> jax.Array:
  """[tile, 1] which rows lie in [start, end) of those that a slice at `start` holds.

  A slice that would run past the array is moved back to fit, as `dynamic_slice` does.
  """
  rows_m1 = (jnp.minimum(start, num_rows - tile) + jnp.arange(tile, dtype=jnp.int32))[:, None]
  return (rows_m1 >= start) & (rows_m1 < end)


def _dot(x_mD: jax.Array, w_DF: jax.Array, contract: int) -> jax.Array:
  accumulate = np.promote_types(x_mD.dtype, np.float32)
  dimensions = (((1,), (contract,)), ((), ()))
  return jax.lax.dot_general(x_mD, w_DF, dimensions, preferred_element_type=accumulate)


def _packed(dtype: jnp.dtype) -> jnp.dtype:
  return jnp.dtype(jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else dtype)


def _pack(x: jax.Array) -> jax.Array:
  """The array as loops should carry it: 16-bit numbers as bits."""
  return jax.lax.bitcast_convert_type(x, _packed(x.dtype))


def _unpack(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, dtype)
