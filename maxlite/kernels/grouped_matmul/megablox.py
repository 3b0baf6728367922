"""Grouped matmul for TPUs: JAX's Megablox kernels with the gradient rule of gradient.py.

`gmm` multiplies rows and leaves the rows past the last group uninitialised; `grouped_matmul` zeroes
them. `tgmm` sums outer products within the groups only, and returns zeros for an empty group. Both
mask the part of a tile beyond the matrices. They require a whole number of row tiles, so other
numbers of rows are copied into a padded buffer.

The kernels do not declare over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False; tests/kernels/test_megablox.py checks their gradients there.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from maxlite.config.errors import UserError
from maxlite.kernels.grouped_matmul.gradient import GroupedKernels, grouped_matmul_of
from maxlite.kernels.grouped_matmul.tiles import Tile, Tiles, choose_tiles
from maxlite.kernels.numerics import ceil_div
from maxlite.kernels.stated_cost import StatedCost, stated_cost


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: Tiles, *, interpret=False
) -> jax.Array:
  """y_MF in x's type, which must be float32 or bfloat16; `interpret` is for tests without a TPU.

  Raises:
    UserError: a tile in `tiles` that TPUs do not support.
  """
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  fitted = fit_tiles(tiles, x_MD.shape[0], x_MD.dtype, w_GDF)
  products = (_multiply_masked, sum_outer_products)
  kernels = GroupedKernels(*(functools.partial(f, interpret=interpret) for f in products))
  return grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, fitted)


def fit_tiles(tiles: Tiles, num_rows: int, dtype: jnp.dtype, w_GDF: jax.Array) -> Tiles:
  """`tiles`, with those that are None chosen, no larger than the arrays.

  Raises:
    UserError: a tile in `tiles` that TPUs do not support.
  """
  itemsizes = dtype.itemsize, w_GDF.dtype.itemsize
  chosen = choose_tiles(num_rows, *w_GDF.shape, *itemsizes, _device_kind())
  return Tiles(
    *(_fit(tile or own, num_rows, w_GDF) for tile, own in zip(tiles, chosen, strict=True))
  )


def _device_kind() -> str:
  """Kind of the devices that the enclosing `shard_map` is compiled for; empty outside of one."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.device_kind if device else ""


def _fit(tile: Tile, num_rows: int, w_GDF: jax.Array) -> Tile:
  """The tile, no larger than the arrays."""
  m, d, f = tile
  _, num_in, num_out = w_GDF.shape
  whole = all(width % 128 == 0 or width >= dim for width, dim in ((d, num_in), (f, num_out)))
  if m % 16 or not whole:
    raise UserError(
      f"Megablox tile {list(tile)} for weights {list(w_GDF.shape)}: rows must be a multiple of 16, "
      "the others of 128 or at least the whole axis"
    )
  return min(m, -(-num_rows // 16) * 16), min(d, num_in), min(f, num_out)


def _multiply_masked(x_MD, w_GDF, group_sizes_G, tile: Tile, transpose: bool, interpret: bool):
  y_MF = multiply_rows(x_MD, w_GDF, group_sizes_G, tile, transpose, interpret)
  live_M = jnp.arange(x_MD.shape[0], dtype=jnp.int32) < group_sizes_G.sum(dtype=jnp.int32)
  return jnp.where(live_M[:, None], y_MF, 0)


def multiply_rows(x_MD, w_GDF, group_sizes_G, tile: Tile, transpose: bool, interpret: bool):
  """As in `GroupedKernels`, but rows past the last group are undefined."""
  num_rows, dtype, x_MD = x_MD.shape[0], x_MD.dtype, _pad_rows(x_MD, tile[0])
  options = {"tiling": tile, "transpose_rhs": transpose, "interpret": interpret}
  with stated_cost(_cost_of_rows(x_MD, w_GDF, tile, transpose)):
    return gmm(x_MD, w_GDF.astype(dtype), group_sizes_G, dtype, **options)[:num_rows]


def sum_outer_products(x_MD, dy_MF, group_sizes_G, dtype, tile: Tile, interpret: bool):
  """As in `GroupedKernels`."""
  x_MD, dy_MF = _pad_rows(x_MD, tile[0]), _pad_rows(dy_MF, tile[0])
  shape = len(group_sizes_G), x_MD.shape[1], dy_MF.shape[1]
  # Each tile of columns of one operand reads the other operand again.
  again = ceil_div(shape[2], tile[2]) * x_MD.nbytes + ceil_div(shape[1], tile[1]) * dy_MF.nbytes
  flops = 2 * x_MD.size * shape[2]
  cost = StatedCost(flops, again, math.prod(shape) * jnp.dtype(dtype).itemsize)
  # `tgmm` mixes int and bool.
  with stated_cost(cost), jax.numpy_dtype_promotion("standard"):
    return tgmm(x_MD.T, dy_MF, group_sizes_G, dtype, tiling=tile, interpret=interpret)


def _cost_of_rows(x_MD, w_GDF, tile: Tile, transpose: bool) -> StatedCost:
  """Each tile of columns reads x again; weights are read once per group if a tile has a whole K."""
  num_rows, num_in = x_MD.shape
  num_groups, num_out = w_GDF.shape[0], w_GDF.shape[1 if transpose else 2]
  m, k, n = tile
  row_bytes = ceil_div(num_out, n) * x_MD.nbytes + num_rows * num_out * x_MD.dtype.itemsize
  group_bytes = num_in * num_out * x_MD.dtype.itemsize
  if k < num_in:
    row_bytes += num_rows // m * group_bytes
  return StatedCost(2 * x_MD.size * num_out, row_bytes, num_groups * group_bytes)


def _pad_rows(x_MD, tile: int):
  """The rows, padded with zeros to whole tiles."""
  return jnp.pad(x_MD, ((0, -x_MD.shape[0] % tile), (0, 0)))
