"""Grouped matmul for TPUs: JAX's Megablox kernels with the gradient rule of gradient.py.

`gmm` multiplies rows and leaves the rows past the last group uninitialised; `grouped_matmul` zeroes
them. `tgmm` sums outer products within the groups only, and returns zeros for an empty group. Both
mask the part of a tile beyond the matrices. They require a whole number of row tiles, so other
numbers of rows are copied into a padded buffer.

The kernels do not declare over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False; tests/kernels/test_megablox.py checks their gradients there.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from maxlite.errors import UserError
from maxlite.kernels.grouped_matmul.gradient import GroupedKernels, grouped_matmul_of
from maxlite.kernels.grouped_matmul.tiles import ChosenTiles, Tile, Tiles, choose_tiles
from maxlite.kernels.numerics import ceil_div
from maxlite.kernels.stated_cost import StatedCost, stated_cost


def grouped_matmul(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tiles: Tiles,
  *,
  interpret: bool = False,
) -> jax.Array:
  """y_MF in x's type, which must be float32 or bfloat16; `interpret` is for tests without a TPU.

  Raises:
    UserError: a tile in `tiles` that TPUs do not support.
  """
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  fitted = fit_tiles(tiles, x_MD.shape[0], x_MD.dtype, w_GDF)
  kernels = GroupedKernels(
    functools.partial(_multiply_masked, interpret=interpret),
    functools.partial(sum_outer_products, interpret=interpret),
  )
  return grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, fitted)


def fit_tiles(tiles: Tiles, num_rows: int, dtype: jnp.dtype, w_GDF: jax.Array) -> ChosenTiles:
  """`tiles`, with those that are None chosen, no larger than the arrays.

  Raises:
    UserError: a tile in `tiles` that TPUs do not support.
  """
  num_groups, num_in, num_out = w_GDF.shape
  chosen = choose_tiles(
    tiles.num_rows or num_rows,
    num_groups,
    num_in,
    num_out,
    row_bytes=dtype.itemsize,
    weight_bytes=w_GDF.dtype.itemsize,
    device_kind=_device_kind(),
  )
  return ChosenTiles(
    fwd=_fit(tiles.fwd or chosen.fwd, num_rows, w_GDF),
    dlhs=_fit(tiles.dlhs or chosen.dlhs, num_rows, w_GDF),
    drhs=_fit(tiles.drhs or chosen.drhs, num_rows, w_GDF),
  )


def _device_kind() -> str:
  """Kind of the devices that the enclosing `shard_map` is compiled for; empty outside of one."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  if device is None:
    return ""
  return device.device_kind


def _fit(tile: Tile, num_rows: int, w_GDF: jax.Array) -> Tile:
  """The tile, no larger than the arrays."""
  m, d, f = tile
  _, num_in, num_out = w_GDF.shape
  fits_in = d % 128 == 0 or d >= num_in
  fits_out = f % 128 == 0 or f >= num_out
  if m % 16 or not fits_in or not fits_out:
    raise UserError(
      f"Megablox tile {list(tile)} for weights {list(w_GDF.shape)}: rows must be a multiple of 16, "
      "the others of 128 or at least the whole axis"
    )
  rows = ceil_div(num_rows, 16) * 16
  return min(m, rows), min(d, num_in), min(f, num_out)


def _multiply_masked(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tile: Tile,
  transpose: bool,
  interpret: bool,
) -> jax.Array:
  """`GroupedKernels.multiply_rows`: zero past the last group."""
  y_MF = multiply_rows(x_MD, w_GDF, group_sizes_G, tile, transpose, interpret)
  live_M = jnp.arange(x_MD.shape[0], dtype=jnp.int32) < group_sizes_G.sum(dtype=jnp.int32)
  return jnp.where(live_M[:, None], y_MF, 0)


def multiply_rows(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tile: Tile,
  transpose: bool,
  interpret: bool,
) -> jax.Array:
  """As `GroupedKernels.multiply_rows`, but rows past the last group are undefined."""
  num_rows = x_MD.shape[0]
  dtype = x_MD.dtype
  x_MD = _pad_rows(x_MD, tile[0])
  with stated_cost(_cost_of_rows(x_MD, w_GDF, tile, transpose)):
    y_MF = gmm(
      x_MD,
      w_GDF.astype(dtype),
      group_sizes_G,
      dtype,
      tiling=tile,
      transpose_rhs=transpose,
      interpret=interpret,
    )
  return y_MF[:num_rows]


def sum_outer_products(
  x_MD: jax.Array,
  dy_MF: jax.Array,
  group_sizes_G: jax.Array,
  dtype: jnp.dtype,
  tile: Tile,
  interpret: bool,
) -> jax.Array:
  """`GroupedKernels.sum_outer_products`."""
  x_MD = _pad_rows(x_MD, tile[0])
  dy_MF = _pad_rows(dy_MF, tile[0])
  cost = _cost_of_outer_products(x_MD, dy_MF, group_sizes_G, dtype, tile)
  # `tgmm` mixes int and bool.
  with stated_cost(cost), jax.numpy_dtype_promotion("standard"):
    return tgmm(x_MD.T, dy_MF, group_sizes_G, dtype, tiling=tile, interpret=interpret)


def _cost_of_outer_products(
  x_MD: jax.Array,
  dy_MF: jax.Array,
  group_sizes_G: jax.Array,
  dtype: jnp.dtype,
  tile: Tile,
) -> StatedCost:
  """The cost of `sum_outer_products`: each tile of columns of one operand reads the other again."""
  num_in = x_MD.shape[1]
  num_out = dy_MF.shape[1]
  _, tile_in, tile_out = tile
  reads_of_x = ceil_div(num_out, tile_out)
  reads_of_dy = ceil_div(num_in, tile_in)
  num_weights = group_sizes_G.shape[0] * num_in * num_out
  return StatedCost(
    flops=2 * x_MD.size * num_out,
    row_bytes=reads_of_x * x_MD.nbytes + reads_of_dy * dy_MF.nbytes,
    fixed_bytes=num_weights * jnp.dtype(dtype).itemsize,
  )


def _cost_of_rows(x_MD: jax.Array, w_GDF: jax.Array, tile: Tile, transpose: bool) -> StatedCost:
  """Each tile of columns reads x again; weights are read once per group if a tile has a whole K."""
  num_rows, num_in = x_MD.shape
  num_groups = w_GDF.shape[0]
  num_out = w_GDF.shape[1] if transpose else w_GDF.shape[2]
  m, k, n = tile
  itemsize = x_MD.dtype.itemsize
  reads_of_x = ceil_div(num_out, n)
  row_bytes = reads_of_x * x_MD.nbytes + num_rows * num_out * itemsize
  group_bytes = num_in * num_out * itemsize
  if k < num_in:
    row_bytes += num_rows // m * group_bytes
  return StatedCost(
    flops=2 * x_MD.size * num_out,
    row_bytes=row_bytes,
    fixed_bytes=num_groups * group_bytes,
  )


def _pad_rows(x_MD: jax.Array, tile: int) -> jax.Array:
  """The rows, padded with zeros to whole tiles."""
  return jnp.pad(x_MD, ((0, -x_MD.shape[0] % tile), (0, 0)))
