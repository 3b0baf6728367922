"""Grouped matmul for NVIDIA GPUs: Pallas Triton kernels, forward and both gradients grouped.

y and dx: each group is split into tiles of rows that start at the group's first row, and the rows
past the last group into tiles of zeros. The number of tiles is known only on the device, so the
grid has as many as any group sizes can need; unused ones store nothing. dw: one program per tile of
a group's matrix loops over the rows of its group, the largest group first. Operands are not copied,
but weights are converted to the type of the rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxlite.config.errors import UserError
from maxlite.kernels.grouped_matmul.gradient import GroupedKernels, grouped_matmul_of
from maxlite.kernels.grouped_matmul.tiles import Tile, Tiles
from maxlite.kernels.numerics import accumulator_dtype, ceil_div
from maxlite.kernels.stated_cost import StatedCost, stated_cost
from maxlite.kernels.triton_blocks import Range, block_dot, load, shape_like, store

_STRIPE = 16  # tiles; concurrent programs share the operands of a stripe in the L2 cache
_SHARED_BYTES = 224 * 1024  # shared memory of a Hopper multiprocessor, filled by eight warps


class _Block(NamedTuple):
  """One program computes m x n sums, k terms at a time."""

  m: int
  k: int
  n: int


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: Tiles, *, interpret=False
) -> jax.Array:
  """y_MF in x's type; `interpret` is for tests without a GPU.

  Raises:
    UserError: a side of a tile is not a power of two, 16 or more.
  """
  for tile in tiles:
    if tile is not None and any(side < 16 or side & (side - 1) for side in tile):
      raise UserError(f"tile {list(tile)}: on a GPU each side must be a power of two, 16 or more")
  if 0 in (*x_MD.shape, *w_GDF.shape):
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  products = (_multiply_rows, _sum_outer_products)
  kernels = GroupedKernels(*(functools.partial(f, interpret=interpret) for f in products))
  return grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, tiles)


def _multiply_rows(x_MD, w_GDF, group_sizes_G, tile: Tile | None, transpose: bool, interpret: bool):
  w_axis = 1 if transpose else 0
  num_rows, num_out = x_MD.shape[0], w_GDF.shape[2 - w_axis]
  block = _Block(*tile) if tile else _default_block(x_MD.dtype, num_out)
  tiles_T3 = _row_tiles(group_sizes_G, num_rows, block.m)
  kernel = functools.partial(_multiply_rows_kernel, w_axis=w_axis, block=block)
  num_programs = tiles_T3.shape[0] * ceil_div(num_out, block.n)
  shape = shape_like(x_MD, (num_rows, num_out), x_MD.dtype)
  call = _build_call(kernel, num_programs, shape, block, x_MD.dtype, interpret)
  # Blocks that several programs read stay in the L2 cache; rows past the last group are written.
  fixed_bytes = (w_GDF.size + shape.size) * shape.dtype.itemsize
  with stated_cost(StatedCost(2 * x_MD.size * num_out, x_MD.nbytes, fixed_bytes)):
    return call(tiles_T3, x_MD, w_GDF.astype(x_MD.dtype))


def _sum_outer_products(x_MD, dy_MF, group_sizes_G, dtype, tile: Tile | None, interpret: bool):
  num_groups, num_in, num_out = group_sizes_G.shape[0], x_MD.shape[1], dy_MF.shape[1]
  block = _Block(tile[1], tile[0], tile[2]) if tile else _default_block(x_MD.dtype, num_out)
  largest_first_G = jnp.argsort(group_sizes_G, descending=True)
  ends_G = jnp.cumsum(group_sizes_G)
  index_G = jnp.arange(num_groups, dtype=jnp.int32)
  groups_G3 = jnp.stack([index_G, ends_G - group_sizes_G, ends_G], axis=1)
  kernel = functools.partial(_outer_products_kernel, block=block)
  num_programs = num_groups * ceil_div(num_in, block.m) * ceil_div(num_out, block.n)
  shape = shape_like(x_MD, (num_groups, num_in, num_out), dtype)
  call = _build_call(kernel, num_programs, shape, block, x_MD.dtype, interpret)
  flops, fixed_bytes = 2 * x_MD.size * num_out, shape.size * shape.dtype.itemsize
  with stated_cost(StatedCost(flops, x_MD.nbytes + dy_MF.nbytes, fixed_bytes)):
    return call(groups_G3[largest_first_G], x_MD, dy_MF)


def _row_tiles(group_sizes_G: jax.Array, num_rows: int, tile: int) -> jax.Array:
  """[T, 3] for each tile of rows: its group, its first row, and the end of its group.

  The rows past the last group are group G. Unused tiles start past the last row.
  """
  # H: the groups and the rows past them, each of which may leave all but one row of a tile empty.
  ends_H = jnp.pad(jnp.cumsum(group_sizes_G), (0, 1), constant_values=num_rows)
  starts_H = jnp.pad(ends_H[:-1], (1, 0))
  num_tiles_H = ceil_div(ends_H - starts_H, tile)
  tile_ends_H = jnp.cumsum(num_tiles_H)
  max_tiles = (num_rows + ends_H.size * (tile - 1)) // tile
  tiles_T = jnp.arange(max_tiles, dtype=jnp.int32)
  groups_T = (tiles_T[:, None] >= tile_ends_H[None, :-1]).sum(1, dtype=jnp.int32)
  rows_T = (starts_H - tile * (tile_ends_H - num_tiles_H))[groups_T] + tile * tiles_T
  return jnp.stack([groups_T, rows_T, ends_H[groups_T]], axis=1)


def _multiply_rows_kernel(tiles_ref, x_ref, w_ref, y_ref, *, w_axis: int, block: _Block):
  num_groups, num_out = w_ref.shape[0], y_ref.shape[1]
  tile, column = _tile_index(pl.program_id(0), tiles_ref.shape[0], ceil_div(num_out, block.n))
  group, row, end = (tiles_ref[tile, i] for i in range(3))
  rows = Range(row, block.m, end)
  columns = Range(column * block.n, block.n, num_out)

  def add_terms(step, y_mn):
    inner = Range(step * block.k, block.k, x_ref.shape[1])
    w_ranges = (inner, columns) if w_axis == 0 else (columns, inner)
    return y_mn + block_dot(load(x_ref, rows, inner), load(w_ref, group, *w_ranges), 1, w_axis)

  num_steps = (group < num_groups).astype(jnp.int32) * ceil_div(x_ref.shape[1], block.k)
  y_mn = jnp.zeros((block.m, block.n), accumulator_dtype(x_ref.dtype))
  y_mn = jax.lax.fori_loop(0, num_steps, add_terms, y_mn)
  store(y_ref, y_mn, rows, columns)


def _outer_products_kernel(groups_ref, x_ref, dy_ref, dw_ref, *, block: _Block):
  _, num_in, num_out = dw_ref.shape
  num_m, num_n = ceil_div(num_in, block.m), ceil_div(num_out, block.n)
  program, per_group = pl.program_id(0), num_m * num_n
  group, start, end = (groups_ref[program // per_group, i] for i in range(3))
  m, n = _tile_index(program % per_group, num_m, num_n)
  ins = Range(m * block.m, block.m, num_in)
  outs = Range(n * block.n, block.n, num_out)

  def add_terms(step, dw_mn):
    # Masked on both sides: a row beyond the group may contain NaN, and 0 * NaN is NaN.
    rows = Range(start + step * block.k, block.k, end)
    return dw_mn + block_dot(load(x_ref, rows, ins), load(dy_ref, rows, outs), 0, 0)

  num_steps = ceil_div(end - start, block.k)
  dw_mn = jnp.zeros((block.m, block.n), accumulator_dtype(x_ref.dtype))
  dw_mn = jax.lax.fori_loop(0, num_steps, add_terms, dw_mn)
  store(dw_ref, dw_mn, group, ins, outs)


def _tile_index(program, num_m: int, num_n: int):
  """(m, n) tile of a program: in stripes of m tiles, down the columns within each stripe."""
  stripe = program // (_STRIPE * num_n)
  within = program % (_STRIPE * num_n)
  height = jnp.minimum(num_m - stripe * _STRIPE, _STRIPE)
  return stripe * _STRIPE + within % height, within // height


def _default_block(dtype, num_out: int) -> _Block:
  """Block for Hopper; n = 256 only if it pads the `num_out` columns by less than half a block."""
  if jnp.dtype(dtype).itemsize > 2:
    return _Block(64, 32, 64)
  return _Block(128, 64, 256 if -num_out % 256 < 128 else 128)


def _build_call(kernel, num_programs: int, shape, block: _Block, dtype, interpret: bool):
  """The kernel as a function of arrays, with as many pipeline stages as shared memory holds."""
  num_warps = 8 if block.m * block.n > 128 * 128 else 4
  stage_bytes = (block.m + block.n) * block.k * jnp.dtype(dtype).itemsize
  num_stages = min(max(_SHARED_BYTES * num_warps // 8 // stage_bytes, 1), 4)
  params = plt.CompilerParams(num_warps=num_warps, num_stages=num_stages)
  options = {"grid": (num_programs,), "compiler_params": params, "interpret": interpret}
  return pl.pallas_call(kernel, out_shape=shape, **options)
