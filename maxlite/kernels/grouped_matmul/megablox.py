"""Grouped matmul for TPUs: JAX's Megablox kernels with the gradient rule of gradient.py.

`gmm` multiplies rows and leaves the rows past the last group uninitialised; they are zeroed here.
`tgmm` sums outer products within the groups only, and returns zeros for an empty group. Both mask
the part of a tile beyond the matrices. They require a whole number of row tiles, so other numbers
of rows are copied into a padded buffer.

The kernels do not declare over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False; tests/kernels/test_megablox.py checks their gradients there.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from maxlite.config.errors import UserError
from maxlite.kernels.grouped_matmul.gradient import GroupedKernels, grouped_matmul_of
from maxlite.kernels.grouped_matmul.tiles import Tile, Tiles, choose_tiles


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: Tiles, *, interpret=False
) -> jax.Array:
  """y_MF in x's type, which must be float32 or bfloat16; `interpret` is for tests without a TPU.

  Raises:
    UserError: a tile in `tiles` that TPUs do not support.
  """
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  num_rows, itemsizes = x_MD.shape[0], (x_MD.dtype.itemsize, w_GDF.dtype.itemsize)
  chosen = choose_tiles(num_rows, *w_GDF.shape, *itemsizes, _device_kind())
  fitted = [_fit(tile or own, num_rows, w_GDF) for tile, own in zip(tiles, chosen, strict=True)]
  products = (_multiply_rows, _sum_outer_products)
  kernels = GroupedKernels(*(functools.partial(f, interpret=interpret) for f in products))
  return grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, Tiles(*fitted))


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


def _multiply_rows(x_MD, w_GDF, group_sizes_G, tile: Tile, transpose: bool, interpret: bool):
  num_rows, dtype, x_MD = x_MD.shape[0], x_MD.dtype, _pad_rows(x_MD, tile[0])
  options = {"tiling": tile, "transpose_rhs": transpose, "interpret": interpret}
  y_MF = gmm(x_MD, w_GDF.astype(dtype), group_sizes_G, dtype, **options)[:num_rows]
  live_M = jnp.arange(num_rows, dtype=jnp.int32) < group_sizes_G.sum(dtype=jnp.int32)
  return jnp.where(live_M[:, None], y_MF, 0)


def _sum_outer_products(x_MD, dy_MF, group_sizes_G, dtype, tile: Tile, interpret: bool):
  x_MD, dy_MF = _pad_rows(x_MD, tile[0]), _pad_rows(dy_MF, tile[0])
  with jax.numpy_dtype_promotion("standard"):  # `tgmm` mixes int and bool
    return tgmm(x_MD.T, dy_MF, group_sizes_G, dtype, tiling=tile, interpret=interpret)


def _pad_rows(x_MD, tile: int):
  """The rows, padded with zeros to whole tiles."""
  return jnp.pad(x_MD, ((0, -x_MD.shape[0] % tile), (0, 0)))
