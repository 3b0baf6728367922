"""A Pallas kernel for TPUs that applies a function to blocks of live rows.

A receive buffer has several times the rows that arrive. XLA's operations touch all of them.
"""

import math
from collections.abc import Callable, Sequence

import jax
from jax.experimental import pallas as pl

from maxlite.kernels.numerics import ceil_div
from maxlite.kernels.stated_cost import StatedCost, stated_cost

_LARGEST_BLOCK = 256
_ROWS = 16  # of a tile of 16-bit values
_LANES = 128
# For two buffers of each operand and result and for float32 temporaries, of 16 MiB.
_BLOCK_BYTES = 5 * 2**19


def map_live_rows(
  function: Callable[..., tuple[jax.Array, ...]],
  *rows: jax.Array,
  num_live: jax.Array,
  in_place: int = 0,
  interpret: bool = False,
) -> Sequence[jax.Array]:
  """The results of `function` on the first `num_live` rows; the others are undefined.

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
