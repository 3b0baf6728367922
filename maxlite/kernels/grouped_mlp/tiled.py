"""The feed-forward networks for CPUs: everything for a tile of rows while it is in the cache.

The activation's operands are the only hidden rows stored as whole arrays, and only the tiles of
groups are touched. The forward pass computes them in a separate loop, so that rematerialization
does not repeat the rest.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.grouped_matmul.tiled import RowTile, for_tiles
from maxlite.kernels.grouped_mlp.composed import Activation, weighted
from maxlite.kernels.numerics import accumulator_dtype, dot, sum_arrays
from maxlite.kernels.xla_cpu import materialized_transpose, pack, unpack

_Arrays = tuple[jax.Array, ...]


class _TiledResiduals(NamedTuple):
  """What the backward pass reads."""

  x_MD: jax.Array
  up_MF: _Arrays
  weight_M: jax.Array
  wi_GDF: _Arrays
  wo_GFD: jax.Array
  group_sizes_G: jax.Array


class _MlpGradients(NamedTuple):
  """The gradients of all rows, and of all matrices in the accumulator type."""

  dx_MD: jax.Array
  dweight_M: jax.Array
  dwi_GDF: _Arrays
  dwo_GFD: jax.Array


def grouped_mlp(
  x_M: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  biases: None,
  group_sizes_G: jax.Array,
  *,
  activation: Activation,
  wi_tiles: object,
  wo_tiles: object,
) -> jax.Array:
  """y_M, of x_M's shape and type, without biases."""
  del biases, wi_tiles, wo_tiles  # this backend's tiles are fixed
  x_MD = x_M.reshape(len(x_M), wo_GFD.shape[2])
  return _apply(x_MD, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation).reshape(x_M.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _apply(
  x_MD: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
  activation: Activation,
) -> jax.Array:
  """y_MD in x's type."""
  y_MD, _ = _forward(x_MD, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation)
  return y_MD


def _forward(
  x_MD: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
  activation: Activation,
) -> tuple[jax.Array, _TiledResiduals]:
  up_MF = jax.custom_batching.sequential_vmap(_up)(x_MD, wi_GDF, group_sizes_G)
  up_MF = tuple(checkpoint_name(up, "mlpwi") for up in up_MF)
  down = jax.custom_batching.sequential_vmap(functools.partial(_down, activation))
  y_MD = down(up_MF, weight_M, wo_GFD, group_sizes_G)
  return y_MD, _TiledResiduals(x_MD, up_MF, weight_M, wi_GDF, wo_GFD, group_sizes_G)


def _backward(
  activation: Activation, residuals: _TiledResiduals, dy_MD: jax.Array
) -> tuple[jax.Array, jax.Array, _Arrays, jax.Array, None]:
  compute = functools.partial(_gradients, activation)
  gradients = jax.custom_batching.sequential_vmap(compute)(residuals, dy_MD)
  dwi_GDF = []
  for dw_GDF, w_GDF in zip(gradients.dwi_GDF, residuals.wi_GDF, strict=True):
    dwi_GDF.append(dw_GDF.astype(w_GDF.dtype))
  dwo_GFD = gradients.dwo_GFD.astype(residuals.wo_GFD.dtype)
  return gradients.dx_MD, gradients.dweight_M, tuple(dwi_GDF), dwo_GFD, None


_apply.defvjp(_forward, _backward)


def _up(x_MD: jax.Array, wi_GDF: _Arrays, group_sizes_G: jax.Array) -> _Arrays:
  """up_MF: the activation's operands."""
  dtype = x_MD.dtype
  num_rows = x_MD.shape[0]
  x_bits_MD = pack(x_MD)

  def body(tile: RowTile, wi_DF: _Arrays, up_MF: _Arrays) -> _Arrays:
    x_mD = tile.read(x_bits_MD, dtype)
    written = []
    for w_DF, whole_MF in zip(wi_DF, up_MF, strict=True):
      up_mF = dot(x_mD, unpack(w_DF, dtype), (1, 0)).astype(dtype)
      written.append(tile.write(whole_MF, up_mF))
    return tuple(written)

  up_MF = tuple(jnp.zeros_like(x_bits_MD, shape=(num_rows, w.shape[2])) for w in wi_GDF)
  wi_bits_GDF = _pack_as(dtype, wi_GDF)
  up_MF = for_tiles(body, up_MF, wi_bits_GDF, group_sizes_G, num_rows)
  return tuple(unpack(up, dtype) for up in up_MF)


def _down(
  activation: Activation,
  up_MF: _Arrays,
  weight_M: jax.Array,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
) -> jax.Array:
  """y_MD"""
  dtype = up_MF[0].dtype
  num_rows = weight_M.shape[0]
  up_bits_MF = tuple(pack(up) for up in up_MF)

  def body(tile: RowTile, matrices: _Arrays, y_MD: jax.Array) -> jax.Array:
    (wo_bits_FD,) = matrices
    up_mF = [tile.read(up, dtype) for up in up_bits_MF]
    h_mF = weighted(activation, up_mF, tile.read(weight_M, weight_M.dtype))
    y_mD = dot(h_mF, unpack(wo_bits_FD, dtype), (1, 0)).astype(dtype)
    return tile.write(y_MD, y_mD)

  y_MD = jnp.zeros_like(up_bits_MF[0], shape=(num_rows, wo_GFD.shape[2]))
  y_MD = for_tiles(body, y_MD, _pack_as(dtype, (wo_GFD,)), group_sizes_G, num_rows)
  return unpack(y_MD, dtype)


class _PackedRows(NamedTuple):
  """The operands of the backward pass that have rows, all but the weights packed."""

  x_MD: jax.Array
  dy_MD: jax.Array
  up_MF: _Arrays
  weight_M: jax.Array


def _gradients(
  activation: Activation, residuals: _TiledResiduals, dy_MD: jax.Array
) -> _MlpGradients:
  dtype = residuals.x_MD.dtype
  rows = _PackedRows(
    x_MD=pack(residuals.x_MD),
    dy_MD=pack(dy_MD),
    up_MF=tuple(pack(up) for up in residuals.up_MF),
    weight_M=residuals.weight_M,
  )
  sums_like = functools.partial(jnp.zeros_like, dtype=accumulator_dtype(dtype))
  zeros = _MlpGradients(
    dx_MD=jnp.zeros_like(rows.x_MD),
    dweight_M=jnp.zeros_like(rows.weight_M),
    dwi_GDF=tuple(sums_like(w) for w in residuals.wi_GDF),
    dwo_GFD=sums_like(residuals.wo_GFD),
  )
  body = functools.partial(_add_tile_gradients, activation, dtype, rows)
  matrices_G = _pack_as(dtype, (*residuals.wi_GDF, residuals.wo_GFD))
  num_rows = rows.x_MD.shape[0]
  gradients = for_tiles(body, zeros, matrices_G, residuals.group_sizes_G, num_rows)
  return gradients._replace(dx_MD=unpack(gradients.dx_MD, dtype))


def _add_tile_gradients(
  activation: Activation,
  dtype: jnp.dtype,
  rows: _PackedRows,
  tile: RowTile,
  matrices: _Arrays,
  gradients: _MlpGradients,
) -> _MlpGradients:
  """`gradients` with those of a tile of a group; `matrices` are the group's, wo last."""
  wo_FD = unpack(matrices[-1], dtype)
  x_mD = tile.read(rows.x_MD, dtype)
  dy_mD = tile.read(rows.dy_MD, dtype)
  up_mF = tuple(tile.read(up, dtype) for up in rows.up_MF)
  weight_m = tile.read(rows.weight_M, rows.weight_M.dtype)
  h_mF, hidden_vjp = jax.vjp(functools.partial(weighted, activation), up_mF, weight_m)
  dup_mF, dweight_m = hidden_vjp(dot(dy_mD, wo_FD, (1, 1)).astype(dtype))
  dx_terms = []
  for dup, wi_DF in zip(dup_mF, matrices[:-1], strict=True):
    dx_terms.append(dot(dup, unpack(wi_DF, dtype), (1, 1)))
  x_Dm = materialized_transpose(x_mD)
  h_Fm = materialized_transpose(h_mF)
  dwi_GDF = []
  for dw_GDF, dup in zip(gradients.dwi_GDF, dup_mF, strict=True):
    dwi_GDF.append(tile.add(dw_GDF, dot(x_Dm, dup, (1, 0))))
  return _MlpGradients(
    dx_MD=tile.write(gradients.dx_MD, sum_arrays(dx_terms).astype(dtype)),
    dweight_M=tile.write(gradients.dweight_M, dweight_m),
    dwi_GDF=tuple(dwi_GDF),
    dwo_GFD=tile.add(gradients.dwo_GFD, dot(h_Fm, dy_mD, (1, 0))),
  )


def _pack_as(dtype: jnp.dtype, matrices: _Arrays) -> _Arrays:
  """The matrices, converted to `dtype` and packed."""
  return tuple(pack(w.astype(dtype)) for w in matrices)
