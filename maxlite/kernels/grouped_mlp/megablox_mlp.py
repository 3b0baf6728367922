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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl

from maxlite.kernels.grouped_matmul import megablox
from maxlite.kernels.grouped_matmul.tiles import ChosenTiles, Tiles, transpose_tile
from maxlite.kernels.grouped_mlp.biases import Biases
from maxlite.kernels.grouped_mlp.composed import Activation
from maxlite.kernels.numerics import accumulator_dtype, ceil_div, sum_arrays
from maxlite.kernels.stated_cost import StatedCost, stated_cost

# Limits of a block of the kernel on live rows.
_LARGEST_BLOCK = 256  # rows
_ROWS = 16  # rows of a tile of 16-bit values
_LANES = 128
# For two buffers of each operand and result and for float32 temporaries, of 16 MiB.
_BLOCK_BYTES = 5 * 2**19

_Arrays = tuple[jax.Array, ...]


class _MlpOptions(NamedTuple):
  """What is static in the computation."""

  activation: Activation
  wi_tiles: Tiles
  wo_tiles: Tiles
  interpret: bool


class _MegabloxResiduals(NamedTuple):
  """What the backward pass reads."""

  x_MD: jax.Array
  up_MF: _Arrays
  weight_M: jax.Array
  wi_GDF: _Arrays
  wo_GFD: jax.Array
  group_sizes_G: jax.Array


def grouped_mlp(
  x_M: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  biases: Biases | None,
  group_sizes_G: jax.Array,
  *,
  activation: Activation,
  wi_tiles: Tiles,
  wo_tiles: Tiles,
  interpret: bool = False,
) -> jax.Array:
  """y_M, of x_M's shape and type."""
  if biases is not None:
    with_biases = []
    for w_GDF, bi_GF in zip(wi_GDF, biases.bi_GF, strict=True):
      with_biases.append(_append_bias(w_GDF, bi_GF))
    wi_GDF = tuple(with_biases)
    wo_GFD = _append_bias(wo_GFD, biases.bo_GD)
  options = _MlpOptions(activation, wi_tiles, wo_tiles, interpret)
  return _apply(options, x_M, weight_M, wi_GDF, wo_GFD, group_sizes_G)


def _append_bias(w_GDF: jax.Array, b_GF: jax.Array) -> jax.Array:
  """The matrices with a bias as the last row."""
  return jnp.concatenate([w_GDF, b_GF[:, None]], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(
  options: _MlpOptions,
  x_M: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
) -> jax.Array:
  y_M, _ = _forward(options, x_M, weight_M, wi_GDF, wo_GFD, group_sizes_G)
  return y_M


def _forward(
  options: _MlpOptions,
  x_M: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
) -> tuple[jax.Array, _MegabloxResiduals]:
  over_rows = _over_live_rows(group_sizes_G, options.interpret)
  multiply = functools.partial(
    megablox.multiply_rows,
    group_sizes_G=group_sizes_G,
    transpose=False,
    interpret=options.interpret,
  )
  num_columns = wi_GDF[0].shape[1]
  x_MD = x_M
  if x_M.shape[1:] != (num_columns,):
    (x_MD,) = over_rows(functools.partial(_flat, num_columns), (x_M,))
  wi_tiles = _fit(options.wi_tiles, x_MD, wi_GDF[0])
  wo_tiles = _fit(options.wo_tiles, x_MD, wo_GFD)
  up_MF = []
  for w_GDF in wi_GDF:
    up_MF.append(checkpoint_name(multiply(x_MD, w_GDF, tile=wi_tiles.fwd), "mlpwi"))
  hidden = functools.partial(_hidden, options.activation, wo_GFD.shape[1])
  (h_MF,) = over_rows(hidden, (weight_M[:, None], *up_MF))
  y_M = multiply(h_MF, wo_GFD, tile=wo_tiles.fwd)
  if x_M.ndim != 2:
    (y_M,) = over_rows(_sum_as(x_M.shape), (y_M,))
  # `jax.checkpoint` rounds, and so copies, a value that is both used and saved. The results of the
  # barriers are only saved.
  residuals = _MegabloxResiduals(
    x_MD=jax.lax.optimization_barrier(x_MD),
    up_MF=tuple(jax.lax.optimization_barrier(up) for up in up_MF),
    weight_M=weight_M,
    wi_GDF=wi_GDF,
    wo_GFD=wo_GFD,
    group_sizes_G=group_sizes_G,
  )
  return y_M, residuals


def _backward(
  options: _MlpOptions, residuals: _MegabloxResiduals, dy_M: jax.Array
) -> tuple[jax.Array, jax.Array, _Arrays, jax.Array, None]:
  x_MD, up_MF, weight_M, wi_GDF, wo_GFD, group_sizes_G = residuals
  wi_tiles = _fit(options.wi_tiles, x_MD, wi_GDF[0])
  wo_tiles = _fit(options.wo_tiles, x_MD, wo_GFD)
  over_rows = _over_live_rows(group_sizes_G, options.interpret)
  multiply_transposed = functools.partial(
    megablox.multiply_rows,
    group_sizes_G=group_sizes_G,
    transpose=True,
    interpret=options.interpret,
  )
  sum_outer_products = functools.partial(
    megablox.sum_outer_products, group_sizes_G=group_sizes_G, interpret=options.interpret
  )
  dy_MD = dy_M
  if dy_M.ndim != 2:
    (dy_MD,) = over_rows(functools.partial(_flat, wo_GFD.shape[2]), (dy_M,))
  dh_MF = multiply_transposed(dy_MD, wo_GFD, tile=transpose_tile(wo_tiles.dlhs))
  gradients = functools.partial(_hidden_gradients, options.activation)
  operands = (dh_MF, weight_M[:, None], *up_MF)
  h_MF, dweight_M1, *dup_MF = over_rows(gradients, operands, in_place=len(operands))
  dwo_GFD = sum_outer_products(h_MF, dy_MD, dtype=wo_GFD.dtype, tile=wo_tiles.drhs)
  # Frees h and dy before the gradients of x, which are exchanged while those of wi are computed.
  dwo_GFD, *dup_MF = jax.lax.optimization_barrier((dwo_GFD, *dup_MF))
  tile = transpose_tile(wi_tiles.dlhs)
  dx_terms = []
  for d_MF, w_GDF in zip(dup_MF, wi_GDF, strict=True):
    dx_terms.append(multiply_transposed(d_MF, w_GDF, tile=tile))
  (dx_M,) = over_rows(_sum_as(dy_M.shape), dx_terms)
  dwi_GDF = []
  for d_MF in dup_MF:
    dwi_GDF.append(sum_outer_products(x_MD, d_MF, dtype=wi_GDF[0].dtype, tile=wi_tiles.drhs))
  return dx_M, dweight_M1[:, 0], tuple(dwi_GDF), dwo_GFD, None


_apply.defvjp(_forward, _backward)


def _over_live_rows(group_sizes_G: jax.Array, interpret: bool) -> Callable[..., _Arrays]:
  """`map_live_rows` for the rows of these groups."""
  num_live = jnp.sum(group_sizes_G, dtype=jnp.int32)
  return functools.partial(map_live_rows, num_live=num_live, interpret=interpret)


def _fit(tiles: Tiles, x_MD: jax.Array, w_GDF: jax.Array) -> ChosenTiles:
  return megablox.fit_tiles(tiles, x_MD.shape[0], x_MD.dtype, w_GDF)


def _flat(num_columns: int, rows: Sequence[jax.Array]) -> tuple[jax.Array]:
  """(x_mD,) of (x_m,), with a column of ones if the matrices have a bias."""
  (x_m,) = rows
  x_mD = x_m.reshape(x_m.shape[0], -1)
  return (_append(x_mD, jnp.ones_like(x_mD[:, :1]), num_columns),)


def _append(x_mD: jax.Array, bias_m1: jax.Array, num_columns: int) -> jax.Array:
  """x_mD, with the column that a bias is multiplied by if the matrices have `num_columns` rows."""
  if x_mD.shape[1] == num_columns:
    return x_mD
  return jnp.concatenate([x_mD, bias_m1], axis=1)


def _sum_as(shape: tuple[int, ...]) -> Callable[..., tuple[jax.Array]]:
  """A function of rows that returns their sum, without a bias's column, as rows of this shape."""
  width = math.prod(shape[1:])

  def add(terms: Sequence[jax.Array]) -> tuple[jax.Array]:
    dtype = terms[0].dtype
    wide = [term[:, :width].astype(accumulator_dtype(dtype)) for term in terms]
    return (sum_arrays(wide).astype(dtype).reshape((-1, *shape[1:])),)

  return add


def _hidden(
  activation: Activation, num_columns: int, rows: Sequence[jax.Array]
) -> tuple[jax.Array]:
  """(h_mF,) of (weight_m1, *up_mF): the hidden rows times their weights, computed in float32."""
  weight_m1, *up_mF = rows
  h_mF = _wide_hidden(activation, weight_m1, up_mF).astype(up_mF[0].dtype)
  return (_append(h_mF, weight_m1.astype(h_mF.dtype), num_columns),)


def _wide_hidden(
  activation: Activation, weight_m1: jax.Array, up_mF: Sequence[jax.Array]
) -> jax.Array:
  """The hidden rows times their weights, in the accumulator type."""
  dtype = accumulator_dtype(up_mF[0].dtype)
  wide_mF = [up.astype(dtype) for up in up_mF]
  return activation(*wide_mF) * weight_m1.astype(dtype)


def _hidden_gradients(activation: Activation, rows: Sequence[jax.Array]) -> _Arrays:
  """(h_mF, dweight_m1, gradient of each array of up_mF) of (dh_mF, weight_m1, *up_mF)."""
  dh_mF, weight_m1, *up_mF = rows
  dtype = dh_mF.dtype
  width = up_mF[0].shape[1]
  num_columns = dh_mF.shape[1]
  h_mF, vjp = jax.vjp(functools.partial(_wide_hidden, activation), weight_m1, up_mF)
  dweight_m1, dup_mF = vjp(dh_mF[:, :width].astype(h_mF.dtype))
  if num_columns > width:
    dweight_m1 += dh_mF[:, width:].astype(dweight_m1.dtype)
  h_mF = _append(h_mF.astype(dtype), weight_m1.astype(dtype), num_columns)
  return h_mF, dweight_m1, *dup_mF


def map_live_rows(
  function: Callable[..., _Arrays],
  rows: Sequence[jax.Array],
  *,
  num_live: jax.Array,
  in_place: int = 0,
  interpret: bool = False,
) -> _Arrays:
  """The results of `function` on the first `num_live` rows; the others are undefined.

  A receive buffer has several times the rows that arrive. XLA's operations would touch all of them;
  this Pallas kernel visits blocks of live rows.

  Args:
    function: maps a sequence of arrays [m, ...] to a tuple of arrays [m, ...]. It is applied to
      blocks of rows, the last of which may have undefined rows, so a row of its results must depend
      on the same row of its operands only.
    rows: the operands, arrays [M, ...] of at least two dimensions.
    num_live: scalar int32.
    in_place: number of leading operands whose memory the leading results take.
    interpret: run without a TPU, for tests.
  """
  num_rows = rows[0].shape[0]
  shapes = jax.eval_shape(function, rows)
  row_bytes = sum(_row_bytes(array) for array in (*rows, *shapes))
  block = _block_rows(num_rows, row_bytes)

  def kernel(*refs: jax.Ref) -> None:
    operand_refs = refs[: len(rows)]
    result_refs = refs[len(rows) :]
    blocks = [ref[...] for ref in operand_refs]
    results = function(blocks)
    for ref, result in zip(result_refs, results, strict=True):
      ref[...] = result

  call = pl.pallas_call(
    kernel,
    out_shape=shapes,
    grid=(ceil_div(num_live, block),),
    in_specs=[_row_blocks(array, block) for array in rows],
    out_specs=tuple(_row_blocks(array, block) for array in shapes),
    input_output_aliases={i: i for i in range(in_place)},
    interpret=interpret,
  )
  with stated_cost(StatedCost(flops=0, row_bytes=num_rows * row_bytes)):
    return call(*rows)


def _block_rows(num_rows: int, row_bytes: int) -> int:
  """Rows of a block: as many as fit, in whole tiles if there is room for one."""
  fitting = _BLOCK_BYTES // row_bytes // _ROWS * _ROWS
  return min(_LARGEST_BLOCK, max(fitting, _ROWS), num_rows)


def _row_blocks(array: jax.Array | jax.ShapeDtypeStruct, block: int) -> pl.BlockSpec:
  """Blocks of `block` rows; a program of the kernel has the block with its number."""
  other_axes = [0] * (array.ndim - 1)
  return pl.BlockSpec((block, *array.shape[1:]), lambda i: (i, *other_axes))


def _row_bytes(array: jax.Array | jax.ShapeDtypeStruct) -> int:
  """Bytes of a row, whose last axis is padded to whole lanes."""
  width = ceil_div(array.shape[-1], _LANES) * _LANES
  return math.prod(array.shape[1:-1]) * width * array.dtype.itemsize
