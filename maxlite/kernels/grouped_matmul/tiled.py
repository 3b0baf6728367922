"""Grouped matmul for CPUs, in plain JAX: work proportional to the rows, for any group sizes.

`for_tiles` loops over groups of rows, tile by tile. The first tile of a group holds the remainder
of its size modulo the largest tile, in the smallest tile that fits it; it may extend beyond the
group, where rows of other groups are masked. All further tiles have the largest size and are
entirely within the group. Empty groups cost nothing. `pack` keeps 16-bit arrays in the form that
loops of XLA:CPU carry without conversion (kernels/xla_cpu.py).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from maxlite.kernels.grouped_matmul.gradient import GroupedKernels, grouped_matmul_of
from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tile
from maxlite.kernels.numerics import accumulator_dtype, dot
from maxlite.kernels.xla_cpu import materialized_transpose, pack, unpack

LARGEST = (128, 256, 512)  # rows of the largest tile: the first with room for an average group
SMALL = 8  # rows per tile if groups have fewer on average

Carry = TypeVar("Carry")  # a pytree of arrays


def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: object
) -> jax.Array:
  """y_MF in x's type."""
  del tiles  # this backend's are fixed
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(x_MD.shape[0], w_GDF.shape[2]))
  kernels = GroupedKernels(_multiply_rows, _sum_outer_products)
  return grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, DEFAULT_TILES)


def _multiply_rows(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tile: Tile | None,
  transpose: bool,
) -> jax.Array:
  del tile
  w_axis = 1 if transpose else 0

  @jax.custom_batching.sequential_vmap
  def multiply(x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
    return _products(x_MD, w_GDF, group_sizes_G, w_axis)

  return multiply(x_MD, w_GDF, group_sizes_G)


def _products(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, w_axis: int
) -> jax.Array:
  """y_MF: the rows times their groups' matrices, whose axis `w_axis` is summed over."""
  dtype = x_MD.dtype
  num_rows = x_MD.shape[0]
  bits_MD = pack(x_MD)

  def body(tile: RowTile, matrices: tuple[jax.Array, ...], y_MF: jax.Array) -> jax.Array:
    (w_bits,) = matrices
    y_mF = dot(tile.read(bits_MD, dtype), unpack(w_bits, dtype), (1, w_axis))
    return tile.write(y_MF, y_mF.astype(dtype))

  y_MF = jnp.zeros_like(bits_MD, shape=(num_rows, w_GDF.shape[2 - w_axis]))
  matrices_G = (pack(w_GDF.astype(dtype)),)
  y_MF = for_tiles(body, y_MF, matrices_G, group_sizes_G, num_rows)
  return unpack(y_MF, dtype)


@jax.custom_batching.sequential_vmap
def _group_sums(x_MD: jax.Array, dy_MF: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
  """dw_GDF in the accumulator type."""
  dtype = x_MD.dtype
  x_bits_MD = pack(x_MD)
  dy_bits_MF = pack(dy_MF)

  def body(tile: RowTile, _: tuple[()], dw_GDF: jax.Array) -> jax.Array:
    x_Dm = materialized_transpose(tile.read(x_bits_MD, dtype))
    return tile.add(dw_GDF, dot(x_Dm, tile.read(dy_bits_MF, dtype), (1, 0)))

  shape = (group_sizes_G.shape[0], x_MD.shape[1], dy_MF.shape[1])
  dw_GDF = jnp.zeros_like(x_bits_MD, shape=shape, dtype=accumulator_dtype(dtype))
  return for_tiles(body, dw_GDF, (), group_sizes_G, x_MD.shape[0])


def _sum_outer_products(
  x_MD: jax.Array,
  dy_MF: jax.Array,
  group_sizes_G: jax.Array,
  dtype: jnp.dtype,
  tile: Tile | None,
) -> jax.Array:
  del tile
  return _group_sums(x_MD, dy_MF, group_sizes_G).astype(dtype)


@dataclasses.dataclass(frozen=True)
class RowTile:
  """`num_rows` rows starting at `row`; `mask_m1` marks those of the group (None: all)."""

  group: jax.Array
  row: jax.Array
  num_rows: int
  mask_m1: jax.Array | None  # only for the first tile of a group

  def read(self, rows_M: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The tile's rows of packed `rows_M` as `dtype`; rows of other groups are zero."""
    rows_m = jax.lax.dynamic_slice_in_dim(rows_M, self.row, self.num_rows)
    return unpack(self._masked(rows_m, 0), dtype)

  def write(self, rows_M: jax.Array, rows_m: jax.Array) -> jax.Array:
    """Packed `rows_M` with the tile's rows replaced; rows of other groups are kept."""
    rows_m = pack(rows_m)
    if self.mask_m1 is not None:
      rows_m = self._masked(rows_m, jax.lax.dynamic_slice_in_dim(rows_M, self.row, self.num_rows))
    return jax.lax.dynamic_update_slice_in_dim(rows_M, rows_m, self.row, axis=0)

  def add(self, sum_G: jax.Array, part: jax.Array) -> jax.Array:
    """`sum_G` with `part` added to the group's sum; the first tile of a group overwrites it."""
    if self.mask_m1 is None:
      part += jax.lax.dynamic_index_in_dim(sum_G, self.group, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(sum_G, part, self.group, 0)

  def _masked(self, rows_m: jax.Array, other: jax.Array | int) -> jax.Array:
    if self.mask_m1 is None:
      return rows_m
    mask = self.mask_m1
    if rows_m.ndim == 1:
      mask = mask[:, 0]
    return jnp.where(mask, rows_m, other)


def for_tiles(
  body: Callable[[RowTile, tuple, Carry], Carry],
  carry: Carry,
  matrices_G: tuple[jax.Array, ...],
  group_sizes_G: jax.Array,
  num_rows: int,
) -> Carry:
  """Runs `carry = body(tile, the group's matrices, carry)` for all tiles of all groups."""
  sizes = tile_sizes(num_rows, group_sizes_G.shape[0])
  ends_G = jnp.cumsum(group_sizes_G)
  starts_G = ends_G - group_sizes_G
  is_empty_G = group_sizes_G == 0
  group_G = jnp.argsort(is_empty_G)  # empty groups last: their matrices are never read

  def visit_group(n: jax.Array, carry: Carry) -> Carry:
    group = group_G[n]
    matrices = tuple(jax.lax.dynamic_index_in_dim(w, group, keepdims=False) for w in matrices_G)

    def visit(row: jax.Array, carry: Carry, size: int, mask_m1: jax.Array | None) -> Carry:
      return body(RowTile(group, row, size, mask_m1), matrices, carry)

    return _for_tiles_of_group(visit, carry, starts_G[group], ends_G[group], sizes, num_rows)

  num_visited = jnp.sum(~is_empty_G, dtype=jnp.int32)
  return jax.lax.fori_loop(0, num_visited, visit_group, carry)


def _for_tiles_of_group(
  visit: Callable[..., Carry],
  carry: Carry,
  start: jax.Array,
  end: jax.Array,
  sizes: tuple[int, ...],
  num_rows: int,
) -> Carry:
  """Runs `carry = visit(row, carry, size, mask_m1)` for the tiles of the rows [start, end)."""
  largest = sizes[-1]
  middle = start + (end - start) % largest  # where the whole tiles begin

  def visit_first(row: jax.Array, carry: Carry, size: int) -> Carry:
    return visit(row, carry, size, _between(row, middle, size, num_rows))

  def visit_whole(row: jax.Array, carry: Carry) -> Carry:
    return visit(row, carry, largest, None)

  smaller = 0
  for size in sizes:
    fits = (middle - start > smaller) & (middle - start <= size)
    stop = jnp.where(fits, middle, start)
    carry = _while(functools.partial(visit_first, size=size), start, stop, size, carry)
    smaller = size
  return _while(visit_whole, middle, end, largest, carry)


def tile_sizes(num_rows: int, num_groups: int) -> tuple[int, ...]:
  """Tile sizes, smallest first: quarters of the largest.

  Every size is a copy of the loop's body in the compiled program, so there are few.
  """
  if num_rows < SMALL * num_groups:
    return (min(SMALL, num_rows),)
  roomy = [size for size in LARGEST if size * num_groups >= num_rows]
  largest = min(roomy, default=max(LARGEST))
  quarter = largest // 4
  sizes = (quarter, 2 * quarter, 3 * quarter, largest)
  return tuple(size for size in sizes if size < num_rows) or (num_rows,)


def _while(
  body: Callable[[jax.Array, Carry], Carry],
  start: jax.Array,
  end: jax.Array,
  step: int,
  carry: Carry,
) -> Carry:
  """Runs `carry = body(row, carry)` for every `step`-th row in [start, end).

  Used also for at most one iteration: a conditional would copy the carried arrays.
  """

  def is_before_end(state: tuple[jax.Array, Carry]) -> jax.Array:
    row, _ = state
    return row < end

  def advance(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
    row, carry = state
    return row + step, body(row, carry)

  _, carry = jax.lax.while_loop(is_before_end, advance, (start, carry))
  return carry


def _between(start: jax.Array, end: jax.Array, size: int, num_rows: int) -> jax.Array:
  """[size, 1] which rows of a slice at `start` are in [start, end).

  A slice that would extend past the array is moved back to fit, as in `dynamic_slice`.
  """
  first = jnp.minimum(start, num_rows - size)
  row_m1 = (first + jnp.arange(size, dtype=jnp.int32))[:, None]
  return (row_m1 >= start) & (row_m1 < end)
