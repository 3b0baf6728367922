"""The feed-forward networks for TPUs: Megablox, and everything else on live rows only.

Rows may be matrices [M, L, 128], the form in which they are exchanged; other kernels copy them to
and from [M, D]. Rows past the last group are neither zeroed nor masked: they are undefined in the
results of each kernel, and no kernel lets them reach another row or a weight.

A bias is one more row of its matrix: the input has a column of ones, and the hidden rows one of the
weights with which they are multiplied.
"""

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from maxlite.kernels.grouped_matmul import megablox
from maxlite.kernels.grouped_matmul.tiles import Tiles
from maxlite.kernels.numerics import accumulator_dtype, ceil_div
from maxlite.kernels.stated_cost import StatedCost, stated_cost

# Of the kernel on live rows.
_LARGEST_BLOCK = 256
_ROWS = 16  # of a tile of 16-bit values
_LANES = 128
# For two buffers of each operand and result and for float32 temporaries, of 16 MiB.
_BLOCK_BYTES = 5 * 2**19


def grouped_mlp(
  x_M, weight_M, wi_GDF: tuple, wo_GFD, biases, group_sizes_G, activation, tiles, interpret=False
) -> jax.Array:
  """y_M, of x_M's shape and type; `tiles` of wi and wo."""
  if biases is not None:
    with_bias = lambda w_GDF, b_GF: jnp.concatenate([w_GDF, b_GF[:, None]], axis=1)
    wi_GDF = tuple(map(with_bias, wi_GDF, biases.bi_GF))
    wo_GFD = with_bias(wo_GFD, biases.bo_GD)
  return _apply(x_M, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation, tiles, interpret)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _apply(x_M, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation, tiles, interpret) -> jax.Array:
  return _forward(x_M, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation, tiles, interpret)[0]


def _forward(x_M, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation, tiles, interpret) -> tuple:
  over_rows = _over_live_rows(group_sizes_G, interpret)
  multiply = functools.partial(
    megablox.multiply_rows, group_sizes_G=group_sizes_G, transpose=False, interpret=interpret
  )
  flat = functools.partial(_flat, wi_GDF[0].shape[1])
  x_MD = x_M if x_M.shape[1:] == wi_GDF[0].shape[1:2] else over_rows(flat, x_M)[0]
  wi_tiles, wo_tiles = _fitted(tiles, x_MD, wi_GDF[0], wo_GFD)
  up_MF = tuple(checkpoint_name(multiply(x_MD, w, tile=wi_tiles.fwd), "mlpwi") for w in wi_GDF)
  hidden = functools.partial(_hidden, activation, wo_GFD.shape[1])
  (h_MF,) = over_rows(hidden, weight_M[:, None], *up_MF)
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
  flat = functools.partial(_flat, wo_GFD.shape[2])
  dy_MD = dy_M if dy_M.ndim == 2 else over_rows(flat, dy_M)[0]
  dh_MF = multiply(dy_MD, wo_GFD, tile=_swapped(wo_tiles.dlhs), transpose=True)
  gradients = functools.partial(_hidden_gradients, activation)
  operands = dh_MF, weight_M[:, None], *up_MF
  h_MF, dweight_M1, *dup_MF = over_rows(gradients, *operands, in_place=len(operands))
  dwo_GFD = sum_outer_products(h_MF, dy_MD, dtype=wo_GFD.dtype, tile=wo_tiles.drhs)
  # Frees h and dy before the gradients of x, which are exchanged while those of wi are computed.
  dwo_GFD, *dup_MF = jax.lax.optimization_barrier((dwo_GFD, *dup_MF))
  tile = _swapped(wi_tiles.dlhs)
  dx_MD = [multiply(d, w, tile=tile, transpose=True) for d, w in zip(dup_MF, wi_GDF, strict=True)]
  (dx_M,) = over_rows(_sum_as(dy_M.shape), *dx_MD)
  dwi_GDF = tuple(
    sum_outer_products(x_MD, d_MF, dtype=wi_GDF[0].dtype, tile=wi_tiles.drhs) for d_MF in dup_MF
  )
  return dx_M, dweight_M1[:, 0], dwi_GDF, dwo_GFD, None


_apply.defvjp(_forward, _backward)


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


def _flat(num_columns: int, x_m: jax.Array) -> tuple[jax.Array]:
  """(x_mD,) with a column of ones if the matrices have a bias."""
  x_mD = x_m.reshape(x_m.shape[0], -1)
  return (_append(x_mD, jnp.ones_like(x_mD[:, :1]), num_columns),)


def _append(x_mD: jax.Array, bias_m1: jax.Array, num_columns: int) -> jax.Array:
  """x_mD, with the column that a bias is multiplied by if the matrices have `num_columns` rows."""
  return x_mD if x_mD.shape[1] == num_columns else jnp.concatenate([x_mD, bias_m1], axis=1)


def _sum_as(shape: tuple[int, ...]) -> Callable[..., tuple[jax.Array]]:
  """A function of rows that returns their sum, without a bias's column, as rows of this shape."""
  width = math.prod(shape[1:])

  def add(*terms: jax.Array) -> tuple[jax.Array]:
    dtype = terms[0].dtype
    total = sum(term[:, :width].astype(accumulator_dtype(dtype)) for term in terms)
    return (total.astype(dtype).reshape(-1, *shape[1:]),)

  return add


def _hidden(activation, num_columns: int, weight_m1, *up_mF) -> tuple[jax.Array]:
  """(h_mF,): the hidden rows times their weights, computed in float32."""
  h_mF = _wide_hidden(activation, weight_m1, *up_mF).astype(up_mF[0].dtype)
  return (_append(h_mF, weight_m1.astype(h_mF.dtype), num_columns),)


def _wide_hidden(activation, weight_m1, *up_mF) -> jax.Array:
  dtype = accumulator_dtype(up_mF[0].dtype)
  return activation(*(up.astype(dtype) for up in up_mF)) * weight_m1.astype(dtype)


def _hidden_gradients(activation, dh_mF, weight_m1, *up_mF) -> tuple[jax.Array, ...]:
  """(h_mF, dweight_m1, *dup_mF)"""
  dtype, (width, num_columns) = dh_mF.dtype, (up_mF[0].shape[1], dh_mF.shape[1])
  h_mF, vjp = jax.vjp(functools.partial(_wide_hidden, activation), weight_m1, *up_mF)
  dweight_m1, *dup_mF = vjp(dh_mF[:, :width].astype(h_mF.dtype))
  if num_columns > width:
    dweight_m1 += dh_mF[:, width:].astype(dweight_m1.dtype)
  return _append(h_mF.astype(dtype), weight_m1.astype(dtype), num_columns), dweight_m1, *dup_mF


def map_live_rows(
  function: Callable[..., tuple[jax.Array, ...]],
  *rows: jax.Array,
  num_live: jax.Array,
  in_place: int = 0,
  interpret: bool = False,
) -> Sequence[jax.Array]:
  """The results of `function` on the first `num_live` rows; the others are undefined.

  A receive buffer has several times the rows that arrive. XLA's operations would touch all of them;
  this Pallas kernel visits blocks of live rows.

  Args:
    function: maps arrays [m, ...] to a tuple of arrays [m, ...]. It is applied to blocks of rows,
      the last of which may have undefined rows, so a row of its results must depend on the same row
      of its operands only.
    rows: arrays [M, ...] of at least two dimensions.
    num_live: scalar int32.
    in_place: number of leading operands whose memory the leading results take.
  """
  num_rows = rows[0].shape[0]
  shapes = jax.eval_shape(function, *rows)
  row_bytes = sum(map(_row_bytes, (*rows, *shapes)))
  block = min(_LARGEST_BLOCK, _BLOCK_BYTES // row_bytes // _ROWS * _ROWS or _ROWS)
  block = min(block, num_rows)

  def kernel(*refs):
    results = function(*(ref[...] for ref in refs[: len(rows)]))
    for ref, result in zip(refs[len(rows) :], results, strict=True):
      ref[...] = result

  def spec(array):
    return pl.BlockSpec((block, *array.shape[1:]), lambda i: (i, *[0] * (array.ndim - 1)))

  call = pl.pallas_call(
    kernel,
    out_shape=shapes,
    grid=(ceil_div(num_live, block),),
    in_specs=[spec(array) for array in rows],
    out_specs=tuple(map(spec, shapes)),
    input_output_aliases={i: i for i in range(in_place)},
    interpret=interpret,
  )
  with stated_cost(StatedCost(0, num_rows * row_bytes)):
    return call(*rows)


def _row_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
  """Bytes of a row, whose last axis is padded to whole lanes."""
  width = ceil_div(array.shape[-1], _LANES) * _LANES
  return math.prod(array.shape[1:-1]) * width * array.dtype.itemsize
