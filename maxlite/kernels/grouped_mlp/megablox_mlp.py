"""The feed-forward networks for TPUs: Megablox, and everything else on live rows only.

Rows may be matrices [M, L, 128], the form in which they are exchanged; other kernels copy them to
and from [M, D]. Rows past the last group are neither zeroed nor masked: they are undefined in the
results of each kernel, and no kernel lets them reach another row or a weight.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.grouped_matmul import megablox
from maxlite.kernels.grouped_matmul.tiles import Tiles
from maxlite.kernels.grouped_mlp.live_rows import map_live_rows
from maxlite.kernels.numerics import accumulator_dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def grouped_mlp(
  x_M,
  weight_M,
  wi_GDF: tuple,
  wo_GFD,
  group_sizes_G,
  activation: Callable[..., jax.Array],
  tiles: tuple[Tiles, Tiles],
  interpret: bool = False,
) -> jax.Array:
  """y_M, of x_M's shape and type, without biases; `tiles` of wi and wo."""
  return _forward(x_M, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation, tiles, interpret)[0]


def _forward(x_M, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation, tiles, interpret) -> tuple:
  over_rows = _over_live_rows(group_sizes_G, interpret)
  multiply = functools.partial(
    megablox.multiply_rows, group_sizes_G=group_sizes_G, transpose=False, interpret=interpret
  )
  x_MD = x_M if x_M.ndim == 2 else over_rows(_flat, x_M)[0]
  wi_tiles, wo_tiles = _fitted(tiles, x_MD, wi_GDF[0], wo_GFD)
  up_MF = tuple(checkpoint_name(multiply(x_MD, w, tile=wi_tiles.fwd), "mlpwi") for w in wi_GDF)
  (h_MF,) = over_rows(functools.partial(_hidden, activation), weight_M[:, None], *up_MF)
  y_MD = multiply(h_MF, wo_GFD, tile=wo_tiles.fwd)
  y_M = y_MD if x_M.ndim == 2 else over_rows(_sum_as(x_M.shape), y_MD)[0]
  # `jax.checkpoint` rounds, and so copies, a value that is both used and saved. The results of the
  # barriers are only saved.
  x_MD, *up_MF = map(jax.lax.optimization_barrier, (x_MD, *up_MF))
  return y_M, (x_MD, up_MF, weight_M, wi_GDF, wo_GFD, group_sizes_G)


def _backward(activation, tiles, interpret, residuals, dy_M) -> tuple:
  x_MD, up_MF, weight_M, wi_GDF, wo_GFD, group_sizes_G = residuals
  wi_tiles, wo_tiles = _fitted(tiles, x_MD, wi_GDF[0], wo_GFD)
  over_rows = _over_live_rows(group_sizes_G, interpret)
  multiply, sum_outer_products = (
    functools.partial(product, group_sizes_G=group_sizes_G, interpret=interpret)
    for product in (megablox.multiply_rows, megablox.sum_outer_products)
  )
  dy_MD = dy_M if dy_M.ndim == 2 else over_rows(_flat, dy_M)[0]
  dh_MF = multiply(dy_MD, wo_GFD, tile=_swapped(wo_tiles.dlhs), transpose=True)
  gradients = functools.partial(_hidden_gradients, activation)
  operands = dh_MF, weight_M[:, None], *up_MF
  h_MF, dweight_M1, *dup_MF = over_rows(gradients, *operands, in_place=len(operands))
  dwo_GFD = sum_outer_products(h_MF, dy_MD, dtype=wo_GFD.dtype, tile=wo_tiles.drhs)
  tile = _swapped(wi_tiles.dlhs)
  dx_MD = [multiply(d, w, tile=tile, transpose=True) for d, w in zip(dup_MF, wi_GDF, strict=True)]
  (dx_M,) = over_rows(_sum_as(dy_M.shape), *dx_MD)
  dwi_GDF = tuple(
    sum_outer_products(x_MD, d_MF, dtype=wi_GDF[0].dtype, tile=wi_tiles.drhs) for d_MF in dup_MF
  )
  return dx_M, dweight_M1[:, 0], dwi_GDF, dwo_GFD, None


grouped_mlp.defvjp(_forward, _backward)


def _over_live_rows(group_sizes_G: jax.Array, interpret: bool) -> Callable[..., tuple]:
  num_live = jnp.sum(group_sizes_G, dtype=jnp.int32)
  return functools.partial(map_live_rows, num_live=num_live, interpret=interpret)


def _fitted(tiles: tuple[Tiles, Tiles], x_MD, wi_GDF, wo_GFD) -> tuple[Tiles, Tiles]:
  """Tiles of wi and wo."""
  rows = x_MD.shape[0], x_MD.dtype
  return megablox.fit_tiles(tiles[0], *rows, wi_GDF), megablox.fit_tiles(tiles[1], *rows, wo_GFD)


def _swapped(tile: tuple[int, int, int]) -> tuple[int, int, int]:
  """The tile of a transposed weight."""
  return tile[0], tile[2], tile[1]


def _flat(x_m: jax.Array) -> tuple[jax.Array]:
  return (x_m.reshape(x_m.shape[0], -1),)


def _sum_as(shape: tuple[int, ...]) -> Callable[..., tuple[jax.Array]]:
  """A function of rows that returns their sum in the form of rows of an array of this shape."""

  def add(*terms: jax.Array) -> tuple[jax.Array]:
    dtype = terms[0].dtype
    total = sum(term.astype(accumulator_dtype(dtype)) for term in terms)
    return (total.astype(dtype).reshape(-1, *shape[1:]),)

  return add


def _hidden(activation, weight_m1, *up_mF) -> tuple[jax.Array]:
  """(h_mF,): the hidden rows times their weights, computed in float32."""
  return (_wide_hidden(activation, weight_m1, *up_mF).astype(up_mF[0].dtype),)


def _wide_hidden(activation, weight_m1, *up_mF) -> jax.Array:
  dtype = accumulator_dtype(up_mF[0].dtype)
  return activation(*(up.astype(dtype) for up in up_mF)) * weight_m1.astype(dtype)


def _hidden_gradients(activation, dh_mF, weight_m1, *up_mF) -> tuple[jax.Array, ...]:
  """(h_mF, dweight_m1, *dup_mF)"""
  h_mF, vjp = jax.vjp(functools.partial(_wide_hidden, activation), weight_m1, *up_mF)
  return h_mF.astype(dh_mF.dtype), *vjp(dh_mF.astype(h_mF.dtype))
