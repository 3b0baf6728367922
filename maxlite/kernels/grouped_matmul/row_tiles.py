"""Loops over groups of rows, tile by tile, for kernels in plain JAX that are fast on CPUs.

The rows by which a group exceeds a multiple of the largest tile come first, in the smallest tile
that holds them; it may reach beyond the group, where the rows of others are masked. All further
tiles are of the largest size and lie whole within the group. So work is proportional to rows, and a
group without rows costs nothing.

XLA:CPU multiplies bfloat16 in hardware only where a dot's result is float32 and its left operand
contracts its last axis, and it converts any bfloat16 array that a loop carries at every turn. Hence
the form of `dot`, `transpose`, and `pack`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

SIZES = (32, 64, 128, 192, 256, 320, 384, 448, 512)
FEW = 8  # rows of a tile, where groups have fewer on average

Carry = Any


@dataclasses.dataclass(frozen=True)
class Tile:
  """`num_rows` rows from `row` on; those of the group are marked in `mine_m1` (None: all)."""

  group: jax.Array
  row: jax.Array
  num_rows: int
  mine_m1: jax.Array | None  # of the group's first tile

  def read(self, rows_M: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The tile's rows of packed `rows_M`, as `dtype`; zero in rows of others."""
    rows_m = jax.lax.dynamic_slice_in_dim(rows_M, self.row, self.num_rows)
    return unpack(self._mine_or(rows_m, 0), dtype)

  def write(self, rows_M: jax.Array, rows_m: jax.Array) -> jax.Array:
    """Packed `rows_M` with the tile's rows replaced; rows of others stay."""
    rows_m = pack(rows_m)
    if self.mine_m1 is not None:
      rows_m = self._mine_or(rows_m, jax.lax.dynamic_slice_in_dim(rows_M, self.row, self.num_rows))
    return jax.lax.dynamic_update_slice_in_dim(rows_M, rows_m, self.row, axis=0)

  def add(self, sum_G: jax.Array, part: jax.Array) -> jax.Array:
    """`sum_G`, zeros at first, with this tile's part added to the group's sum."""
    if self.mine_m1 is None:  # else there is nothing yet
      part += jax.lax.dynamic_index_in_dim(sum_G, self.group, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(sum_G, part, self.group, 0)

  def _mine_or(self, rows_m: jax.Array, other: jax.Array | int) -> jax.Array:
    if self.mine_m1 is None:
      return rows_m
    return jnp.where(self.mine_m1 if rows_m.ndim > 1 else self.mine_m1[:, 0], rows_m, other)


def for_tiles(
  body: Callable[[Tile, tuple, Carry], Carry],
  carry: Carry,
  matrices_G: tuple[jax.Array, ...],
  group_sizes_G: jax.Array,
  num_rows: int,
) -> Carry:
  """`carry` after `body(tile, the group's matrices, carry)` for all tiles of all groups."""
  sizes = _sizes(num_rows, group_sizes_G.shape[0])
  ends_G = jnp.cumsum(group_sizes_G)
  starts_G = ends_G - group_sizes_G
  is_empty_G = group_sizes_G == 0
  group_G = jnp.argsort(is_empty_G)  # those without rows, whose matrices need no reading, last

  def group_body(n, carry):
    group = group_G[n]
    start, end = starts_G[group], ends_G[group]
    matrices = tuple(jax.lax.dynamic_index_in_dim(w, group, keepdims=False) for w in matrices_G)
    middle = start + (end - start) % sizes[-1]
    visit = lambda tile, carry: body(tile, matrices, carry)
    for smaller, size in zip((0, *sizes), sizes, strict=False):
      mine = functools.partial(_between, end=middle, size=size, num_rows=num_rows)
      first = lambda row, carry, n=size, mine=mine: visit(Tile(group, row, n, mine(row)), carry)
      fits = (middle - start > smaller) & (middle - start <= size)
      carry = _while(first, start, jnp.where(fits, middle, start), size, carry)
    further = lambda row, carry: visit(Tile(group, row, sizes[-1], None), carry)
    return _while(further, middle, end, sizes[-1], carry)

  return jax.lax.fori_loop(0, jnp.sum(~is_empty_G, dtype=jnp.int32), group_body, carry)


def _sizes(num_rows: int, num_groups: int) -> tuple[int, ...]:
  """The sizes of tiles, smallest first."""
  if num_rows < FEW * num_groups:
    return (min(FEW, num_rows),)
  return tuple(size for size in SIZES if size < num_rows) or (num_rows,)


def _while(body: Callable[..., Carry], start, end, step: int, carry: Carry) -> Carry:
  """`carry` after `body(row, carry)` for every `step`-th row of [start, end).

  Also where one turn or none is sure: a conditional would copy the carried arrays.
  """

  def advance(state):
    return state[0] + step, body(*state)

  return jax.lax.while_loop(lambda state: state[0] < end, advance, (start, carry))[1]


def _between(start, end, size: int, num_rows: int) -> jax.Array:
  """[size, 1] which rows lie in [start, end) of those that a slice at `start` holds.

  A slice that would run past the array is moved back to fit, as `dynamic_slice` does.
  """
  rows_m1 = (jnp.minimum(start, num_rows - size) + jnp.arange(size, dtype=jnp.int32))[:, None]
  return (rows_m1 >= start) & (rows_m1 < end)


def dot(x_mD: jax.Array, w_DF: jax.Array, contract: int = 0) -> jax.Array:
  """x times w summed over w's axis `contract`, in the accumulator's type (float32 or wider)."""
  dimensions = (((1,), (contract,)), ((), ()))
  return jax.lax.dot_general(x_mD, w_DF, dimensions, preferred_element_type=accumulator(x_mD.dtype))


def transpose(x_mD: jax.Array) -> jax.Array:
  """x_Dm, kept out of the product into which XLA would fold it: that is slower."""
  return jax.lax.optimization_barrier(x_mD.T)


def accumulator(dtype: jnp.dtype) -> jnp.dtype:
  """The type in which products of `dtype` are summed."""
  return np.promote_types(dtype, np.float32)


def pack(x: jax.Array) -> jax.Array:
  """The array as loops should carry it: 16-bit numbers as bits."""
  return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else x.dtype)


def unpack(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, dtype)
