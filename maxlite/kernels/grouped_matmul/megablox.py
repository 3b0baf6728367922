"""Grouped matmul for TPUs: JAX's Megablox kernels under a gradient of our own.

`gmm` multiplies rows and leaves those past the last group as memory was, so they are cut off here;
`tgmm` sums outer products within the groups alone, and zeros for an empty group. Both mask what a
tile reaches beyond the matrices, and want rows in whole tiles: any other number of them is copied
to be padded.

The kernels do not say over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from maxlite.config.errors import UserError
from maxlite.kernels.grouped_matmul.tiles import Tile, Tiles, choose_tiles


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
    UserError: if a tile of `tiles` is not one that a TPU can hold.
  """
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  chosen = choose_tiles(
    x_MD.shape[0], *w_GDF.shape, x_MD.dtype.itemsize, w_GDF.dtype.itemsize, _device_kind()
  )
  fitted = Tiles(
    *(_fit(asked or own, x_MD.shape[0], w_GDF) for asked, own in zip(tiles, chosen, strict=True))
  )
  return _grouped_matmul(x_MD, w_GDF, group_sizes_G, fitted, interpret)


def _device_kind() -> str:
  """Kind of the devices that the enclosing `shard_map` compiles for; empty outside of one."""
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_matmul(x_MD, w_GDF, group_sizes_G, tiles: Tiles, interpret: bool):
  return _multiply_rows(x_MD, w_GDF, group_sizes_G, tiles.fwd, interpret)


def _forward(x_MD, w_GDF, group_sizes_G, tiles: Tiles, interpret: bool):
  y_MF = _grouped_matmul(x_MD, w_GDF, group_sizes_G, tiles, interpret)
  return y_MF, (x_MD, w_GDF, group_sizes_G)


def _backward(tiles: Tiles, interpret: bool, saved, dy_MF):
  x_MD, w_GDF, group_sizes_G = saved
  m, d, f = tiles.dlhs
  dx_MD = _multiply_rows(dy_MF, w_GDF, group_sizes_G, (m, f, d), interpret, transpose=True)
  dw_GDF = _sum_outer_products(x_MD, dy_MF, group_sizes_G, w_GDF.dtype, tiles.drhs, interpret)
  return dx_MD, dw_GDF, None


_grouped_matmul.defvjp(_forward, _backward)


def _multiply_rows(x_MD, w_GDF, group_sizes_G, tiling: Tile, interpret: bool, transpose=False):
  """Rows times their group's matrix, or its transpose; `tiling` is of rows, x's axis, y's axis."""
  y_MF = gmm(
    _pad_rows(x_MD, tiling[0]),
    w_GDF.astype(x_MD.dtype),
    group_sizes_G,
    preferred_element_type=x_MD.dtype,
    tiling=tiling,
    transpose_rhs=transpose,
    interpret=interpret,
  )[: x_MD.shape[0]]
  live_M = jnp.arange(x_MD.shape[0], dtype=jnp.int32) < group_sizes_G.sum(dtype=jnp.int32)
  return jnp.where(live_M[:, None], y_MF, 0)


def _sum_outer_products(x_MD, dy_MF, group_sizes_G, dtype, tiling: Tile, interpret: bool):
  """dw_GDF in `dtype`."""
  with jax.numpy_dtype_promotion("standard"):  # `tgmm` mixes int and bool
    return tgmm(
      _pad_rows(x_MD, tiling[0]).T,
      _pad_rows(dy_MF, tiling[0]),
      group_sizes_G,
      preferred_element_type=dtype,
      tiling=tiling,
      interpret=interpret,
    )


def _pad_rows(x_MD, tile: int):
  """The rows and as many zeros as fill the last tile."""
  return jnp.pad(x_MD, ((0, -x_MD.shape[0] % tile), (0, 0)))
