"""The gradient rule of grouped matmul, for backends that implement its two products as kernels."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax

from maxlite.kernels.grouped_matmul.tiles import ChosenTiles, Tiles, transpose_tile


class GroupedKernels(NamedTuple):
  """The two products. A tile is in the order of the operands' axes, or None: the kernel's choice.

  - multiply_rows(x_MD, w_GDF, group_sizes_G, tile, transpose): y_MF in x's type, each row times its
    group's matrix; with `transpose`, y_MD of x_MF times the transposed matrix. Tile: (M, x's axis,
    y's axis).
  - sum_outer_products(x_MD, dy_MF, group_sizes_G, dtype, tile): dw_GDF in `dtype`, the sum over
    each group's rows of the outer products of x and dy. Tile: (M, D, F).
  """

  multiply_rows: Callable[..., jax.Array]
  sum_outer_products: Callable[..., jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def grouped_matmul_of(
  kernels: GroupedKernels,
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tiles: Tiles | ChosenTiles,
) -> jax.Array:
  """y_MF in x's type; the weight gradient has w's type."""
  return kernels.multiply_rows(x_MD, w_GDF, group_sizes_G, tiles.fwd, transpose=False)


class _MatmulOperands(NamedTuple):
  """What the backward pass reads."""

  x_MD: jax.Array
  w_GDF: jax.Array
  group_sizes_G: jax.Array


def _forward(
  kernels: GroupedKernels,
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tiles: Tiles | ChosenTiles,
) -> tuple[jax.Array, _MatmulOperands]:
  y_MF = grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, tiles)
  return y_MF, _MatmulOperands(x_MD, w_GDF, group_sizes_G)


def _backward(
  kernels: GroupedKernels,
  tiles: Tiles | ChosenTiles,
  operands: _MatmulOperands,
  dy_MF: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
  x_MD, w_GDF, group_sizes_G = operands
  tile = transpose_tile(tiles.dlhs)
  dx_MD = kernels.multiply_rows(dy_MF, w_GDF, group_sizes_G, tile, transpose=True)
  dw_GDF = kernels.sum_outer_products(x_MD, dy_MF, group_sizes_G, w_GDF.dtype, tiles.drhs)
  return dx_MD, dw_GDF, None


grouped_matmul_of.defvjp(_forward, _backward)
