"""Grouped matmul for NVIDIA GPUs: Pallas Triton kernels, forward and both gradients grouped.

y and dx: every group is cut into tiles of rows that begin where the group begins, and the rows past
the last group into tiles of zeros. How many tiles that takes is known on the device only, so the
grid has as many as any sizes can need; those left over store nothing. dw: one program per tile of a
group's matrix goes over the rows of its group, the largest group first. No operand is copied, but
weights are converted to the type of the rows.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxlite.config.errors import UserError
from maxlite.kernels.grouped_matmul.tiles import Tiles

_STRIPE = 16  # tiles: programs that run together share what a stripe of them reads in the L2 cache
_SHARED_BYTES = 224 * 1024  # of a Hopper multiprocessor, which eight warps are to fill


class _Block(NamedTuple):
  """What one program computes: `tall` x `wide` sums, `deep` terms at a time."""

  tall: int
  deep: int
  wide: int


class _Span(NamedTuple):
  """The indices from `start` to `start + size`; those not below `end` are masked.

  Where `end` is an int, that of an axis, spans begin at multiples of their size.
  """

  start: jax.Array | int
  size: int
  end: jax.Array | int


def grouped_matmul(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tiles: Tiles,
  *,
  interpret: bool = False,
) -> jax.Array:
  """y_MF in x's type; `interpret` is for tests without a GPU.

  Raises:
    UserError: if a side of a tile is not a power of two, 16 or more.
  """
  for tile in tiles:
    if tile is not None and any(side < 16 or side & (side - 1) for side in tile):
      raise UserError(f"tile {list(tile)}: on a GPU each side must be a power of two, 16 or more")
  if 0 in (*x_MD.shape, *w_GDF.shape):
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  return _grouped_matmul(x_MD, w_GDF, group_sizes_G, tiles, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped_matmul(x_MD, w_GDF, group_sizes_G, tiles: Tiles, interpret: bool):
  block = _Block(*tiles.fwd) if tiles.fwd else _default_block(x_MD.dtype, w_GDF.shape[2])
  return _multiply_rows(x_MD, w_GDF, group_sizes_G, 0, block, interpret)


def _forward(x_MD, w_GDF, group_sizes_G, tiles: Tiles, interpret: bool):
  y_MF = _grouped_matmul(x_MD, w_GDF, group_sizes_G, tiles, interpret)
  return y_MF, (x_MD, w_GDF, group_sizes_G)


def _backward(tiles: Tiles, interpret: bool, saved, dy_MF):
  x_MD, w_GDF, group_sizes_G = saved
  default = functools.partial(_default_block, x_MD.dtype)
  dlhs, drhs = tiles.dlhs, tiles.drhs
  dx_block = _Block(dlhs[0], dlhs[2], dlhs[1]) if dlhs else default(w_GDF.shape[1])
  dw_block = _Block(drhs[1], drhs[0], drhs[2]) if drhs else default(w_GDF.shape[2])
  dx_MD = _multiply_rows(dy_MF, w_GDF, group_sizes_G, 1, dx_block, interpret)
  dw_GDF = _sum_outer_products(x_MD, dy_MF, group_sizes_G, w_GDF.dtype, dw_block, interpret)
  return dx_MD, dw_GDF, None


_grouped_matmul.defvjp(_forward, _backward)


def _multiply_rows(x_MD, w_GDF, group_sizes_G, contract: int, block, interpret) -> jax.Array:
  """Rows times their group's matrix, of which axis `contract` is summed over."""
  num_rows, num_out = x_MD.shape[0], w_GDF.shape[2 - contract]
  tiles_T3 = _row_tiles(group_sizes_G, num_rows, block.tall)
  kernel = functools.partial(_multiply_rows_kernel, contract=contract, block=block)
  num_programs = tiles_T3.shape[0] * _ceil_div(num_out, block.wide)
  shape = _shape_like(x_MD, (num_rows, num_out), x_MD.dtype)
  operands = tiles_T3, x_MD, w_GDF.astype(x_MD.dtype)
  return _call(kernel, num_programs, shape, block, x_MD.dtype, interpret)(*operands)


def _sum_outer_products(x_MD, dy_MF, group_sizes_G, dtype, block, interpret) -> jax.Array:
  """Per group the sum of its rows' outer products, in `dtype`."""
  num_groups, num_in, num_out = group_sizes_G.shape[0], x_MD.shape[1], dy_MF.shape[1]
  largest_first_G = jnp.argsort(group_sizes_G, descending=True)
  ends_G = jnp.cumsum(group_sizes_G)
  index_G = jnp.arange(num_groups, dtype=jnp.int32)
  groups_G3 = jnp.stack([index_G, ends_G - group_sizes_G, ends_G], axis=1)
  kernel = functools.partial(_outer_products_kernel, block=block)
  num_programs = num_groups * _ceil_div(num_in, block.tall) * _ceil_div(num_out, block.wide)
  shape = _shape_like(x_MD, (num_groups, num_in, num_out), dtype)
  operands = groups_G3[largest_first_G], x_MD, dy_MF
  return _call(kernel, num_programs, shape, block, x_MD.dtype, interpret)(*operands)


def _row_tiles(group_sizes_G: jax.Array, num_rows: int, tile: int) -> jax.Array:
  """[T, 3] of each tile of rows: its group, its first row, and the first past its group.

  Group G is that of the rows past the last group. Tiles left over begin past the last row.
  """
  # H: the groups and the rows past them, each of which may leave all but one row of a tile empty.
  ends_H = jnp.pad(jnp.cumsum(group_sizes_G), (0, 1), constant_values=num_rows)
  starts_H = jnp.pad(ends_H[:-1], (1, 0))
  num_tiles_H = _ceil_div(ends_H - starts_H, tile)
  tile_ends_H = jnp.cumsum(num_tiles_H)
  most = (num_rows + ends_H.size * (tile - 1)) // tile
  tiles_T = jnp.arange(most, dtype=jnp.int32)
  groups_T = (tiles_T[:, None] >= tile_ends_H[None, :-1]).sum(1, dtype=jnp.int32)
  rows_T = (starts_H - tile * (tile_ends_H - num_tiles_H))[groups_T] + tile * tiles_T
  return jnp.stack([groups_T, rows_T, ends_H[groups_T]], axis=1)


def _multiply_rows_kernel(tiles_ref, x_ref, w_ref, y_ref, *, contract: int, block: _Block):
  num_groups, num_out = w_ref.shape[0], y_ref.shape[1]
  tile, column = _place(pl.program_id(0), tiles_ref.shape[0], _ceil_div(num_out, block.wide))
  group, row, end = (tiles_ref[tile, i] for i in range(3))
  rows = _Span(row, block.tall, end)
  outer = _Span(column * block.wide, block.wide, num_out)

  def add_terms(step, y_mo):
    inner = _Span(step * block.deep, block.deep, x_ref.shape[1])
    w_spans = (inner, outer) if contract == 0 else (outer, inner)
    return y_mo + _dot(_load(x_ref, rows, inner), _load(w_ref, group, *w_spans), 1, contract)

  num_steps = (group < num_groups).astype(jnp.int32) * _ceil_div(x_ref.shape[1], block.deep)
  y_mo = jax.lax.fori_loop(0, num_steps, add_terms, _zeros(x_ref.dtype, block))
  _store(y_ref, y_mo, rows, outer)


def _outer_products_kernel(groups_ref, x_ref, dy_ref, dw_ref, *, block: _Block):
  _, num_in, num_out = dw_ref.shape
  num_tall, num_wide = _ceil_div(num_in, block.tall), _ceil_div(num_out, block.wide)
  program, per_group = pl.program_id(0), num_tall * num_wide
  group, start, end = (groups_ref[program // per_group, i] for i in range(3))
  d, f = _place(program % per_group, num_tall, num_wide)
  ins = _Span(d * block.tall, block.tall, num_in)
  outs = _Span(f * block.wide, block.wide, num_out)

  def add_terms(step, dw_df):
    # Masked on both sides: a row beyond the group may hold NaN, and 0 * NaN is NaN.
    rows = _Span(start + step * block.deep, block.deep, end)
    return dw_df + _dot(_load(x_ref, rows, ins), _load(dy_ref, rows, outs), 0, 0)

  num_steps = _ceil_div(end - start, block.deep)
  dw_df = jax.lax.fori_loop(0, num_steps, add_terms, _zeros(x_ref.dtype, block))
  _store(dw_ref, dw_df, group, ins, outs)


def _ceil_div(a, b: int):
  return (a + b - 1) // b  # `pl.cdiv` of an int32 array fails where 64-bit types are enabled


def _place(program, num_tall: int, num_wide: int):
  """(tall, wide) tile of a program: stripe by stripe of tall tiles, in each down the columns."""
  stripe = program // (_STRIPE * num_wide)
  within = program % (_STRIPE * num_wide)
  height = jnp.minimum(num_tall - stripe * _STRIPE, _STRIPE)
  return stripe * _STRIPE + within % height, within // height


def _load(ref, *where: jax.Array | _Span) -> jax.Array:
  """The values of `ref` at `where`, zero where masked."""
  mask = _mask(where)
  view = ref.at[_indices(where)]
  return plt.load(view) if mask is None else plt.load(view, mask=mask, other=0)


def _store(ref, values: jax.Array, *where: jax.Array | _Span) -> None:
  plt.store(ref.at[_indices(where)], values.astype(ref.dtype), mask=_mask(where))


def _indices(where):
  return tuple(pl.ds(i.start, i.size) if isinstance(i, _Span) else i for i in where)


def _mask(where) -> jax.Array | None:
  """[tall, wide] which elements of the last two spans count; None if all always do."""
  shape = tuple(span.size for span in where[-2:])
  masks = []
  for axis, span in enumerate(where[-2:]):
    whole = isinstance(span.end, int) and span.end % span.size == 0
    if not whole:
      inside = span.start + jnp.arange(span.size, dtype=jnp.int32) < span.end
      masks.append(jnp.broadcast_to(jnp.expand_dims(inside, 1 - axis), shape))
  return functools.reduce(jnp.logical_and, masks) if masks else None


def _dot(a, b, a_axis: int, b_axis: int) -> jax.Array:
  """Product summed over these axes, in the accumulator's type; never in TensorFloat-32."""
  return jax.lax.dot_general(
    a,
    b,
    (((a_axis,), (b_axis,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=_accumulator(a.dtype),
  )


def _zeros(dtype, block: _Block) -> jax.Array:
  return jnp.zeros((block.tall, block.wide), _accumulator(dtype))


def _accumulator(dtype) -> np.dtype:
  return np.promote_types(dtype, np.float32)


def _default_block(dtype, num_wide: int) -> _Block:
  """For Hopper; `num_wide`: columns of the result, which a block of 256 must not pad in vain."""
  if jnp.dtype(dtype).itemsize > 2:
    return _Block(64, 32, 64)
  return _Block(128, 64, 256 if -num_wide % 256 < 128 else 128)


def _shape_like(x: jax.Array, shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
  """A result that varies over the mesh axes over which `x` does."""
  return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _call(kernel, num_programs: int, shape, block: _Block, dtype, interpret: bool):
  """The kernel as a function of arrays, with as many pipeline stages as shared memory holds."""
  num_warps = 8 if block.tall * block.wide > 128 * 128 else 4
  stage_bytes = (block.tall + block.wide) * block.deep * jnp.dtype(dtype).itemsize
  num_stages = min(max(_SHARED_BYTES * num_warps // 8 // stage_bytes, 1), 4)
  return pl.pallas_call(
    kernel,
    grid=(num_programs,),
    out_shape=shape,
    compiler_params=plt.CompilerParams(num_warps=num_warps, num_stages=num_stages),
    interpret=interpret,
  )
