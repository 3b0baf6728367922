"""Attention for NVIDIA GPUs: Pallas Triton kernels that keep a block of scores on the chip.

Three kernels: the output and the log-sum-exp of each row; dq; dk and dv. A program has one block of
queries of a head (of keys of a group of heads in the third) and loops over the blocks of the other
side. The loop's first and last block are computed before the kernels start, from the rows and the
segments of each block: blocks in the future, before the window or in other documents are skipped.
Channels are processed in powers of two: 192 is 128 and 64. Scores are in base 2 within kernels.

Source: Dao, FlashAttention-2 (2023), section 3.1.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxlite.kernels.attention.reference import RESIDUAL_NAME, AttentionMask, PartialAttention
from maxlite.kernels.numerics import accumulator_dtype, ceil_div
from maxlite.kernels.stated_cost import StatedCost, stated_cost
from maxlite.kernels.triton_blocks import Range, block_dot, load, shape_like, store

_LOG2_E = math.log2(math.e)
_MIN_SIDE = 16  # of a product of tensor cores
_STAGE_BYTES = 96 * 1024  # shared memory for the pipeline, within that of every GPU since Ampere
_NO_QUERY, _NO_KEY = -2, -1  # segments beyond the last row: they match nothing


class _KernelOptions(NamedTuple):
  scale: float
  soft_cap: float
  window: int | None
  has_sinks: bool
  interpret: bool


class _Rows(NamedTuple):
  """What decides which keys a query attends."""

  q_start_1: jax.Array
  q_segment_BT: jax.Array
  kv_segment_BS: jax.Array


class _Operands(NamedTuple):
  q_BTHC: jax.Array
  k_BSGC: jax.Array
  v_BSGC: jax.Array
  sink_H: jax.Array  # ignored without sinks


class _Blocks(NamedTuple):
  """Rows of a block of queries and of a block of keys."""

  q: int
  k: int


class _Shape(NamedTuple):
  """Sizes of the operands, and those of the blocks."""

  T: int
  S: int
  heads_per_group: int
  key_channels: tuple[Range, ...]
  value_channels: tuple[Range, ...]
  blocks: _Blocks


def attention(q_BTHC, k_BSGC, v_BSGC, mask: AttentionMask, **options: Any) -> jax.Array:
  """o_BTHC in q's type; options as in `_prepare`."""
  return _attend(*_prepare(q_BTHC, k_BSGC, v_BSGC, mask, **options))


def _prepare(
  q_BTHC, k_BSGC, v_BSGC, mask, *, scale, block_q, soft_cap, sink_H=None, interpret=False
) -> tuple[_KernelOptions, _Operands, _Rows]:
  """`interpret` is for tests without a GPU."""
  del block_q
  options = _KernelOptions(scale, soft_cap, mask.window, sink_H is not None, interpret)
  q_start_1 = jnp.asarray(mask.q_start, jnp.int32).reshape(1)
  rows = _Rows(q_start_1, mask.q_segment_BT, mask.kv_segment_BS)
  sink_H = jnp.zeros_like(q_BTHC, shape=q_BTHC.shape[2]) if sink_H is None else sink_H
  return options, _Operands(q_BTHC, k_BSGC, v_BSGC, sink_H), rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _KernelOptions, operands: _Operands, rows: _Rows) -> jax.Array:
  return _forward(options, operands, rows)[0]


def _forward(options: _KernelOptions, operands: _Operands, rows: _Rows):
  """(o_BTHC, residuals)"""
  residuals = checkpoint_name(_compute(options, operands, rows), RESIDUAL_NAME)
  return residuals[0], (operands, rows, *residuals)


def _compute(options: _KernelOptions, operands: _Operands, rows: _Rows) -> list[jax.Array]:
  """[o_BTHC, lse_BHT]"""
  q_BTHC, v_BSGC = operands.q_BTHC, operands.v_BSGC
  num_seqs, num_queries, num_heads, _ = q_BTHC.shape
  is_narrow = q_BTHC.dtype.itemsize == 2
  shape = _shape(operands, _Blocks(128, 64) if is_narrow else _Blocks(32, 32))
  ranges_BI2 = _block_ranges(_overlap(options, rows, shape.blocks))
  grid = (ceil_div(num_queries, shape.blocks.q), num_heads, num_seqs)
  o_shape = shape_like(q_BTHC, (*q_BTHC.shape[:3], v_BSGC.shape[3]), q_BTHC.dtype)
  sum_dtype = accumulator_dtype(q_BTHC.dtype)
  lse_shape = shape_like(q_BTHC, (num_seqs, num_heads, num_queries), sum_dtype)
  arrays = ranges_BI2, *rows, *operands
  return _call(_forward_kernel, options, shape, grid, arrays, (o_shape, lse_shape))


def _backward(options: _KernelOptions, residuals, do_BTHC):
  operands, rows, o_BTHC, lse_BHT = residuals
  q_BTHC, k_BSGC, v_BSGC, sink_H = operands
  sum_dtype = lse_BHT.dtype
  mean_BTH = (do_BTHC.astype(sum_dtype) * o_BTHC.astype(sum_dtype)).sum(-1)
  mean_BHT = mean_BTH.swapaxes(1, 2)
  arrays = *rows, *operands, do_BTHC, lse_BHT, mean_BHT
  num_seqs, num_queries, num_heads, _ = q_BTHC.shape
  is_narrow = q_BTHC.dtype.itemsize == 2
  like = lambda x: shape_like(q_BTHC, x.shape, x.dtype)
  shape = _shape(operands, _Blocks(128, 32) if is_narrow else _Blocks(32, 32))
  ranges_BI2 = _block_ranges(_overlap(options, rows, shape.blocks))
  grid = (ceil_div(num_queries, shape.blocks.q), num_heads, num_seqs)
  results = (like(q_BTHC),)
  (dq_BTHC,) = _call(_dq_kernel, options, shape, grid, (ranges_BI2, *arrays), results)
  shape = _shape(operands, _Blocks(32, 128) if is_narrow else _Blocks(32, 32))
  ranges_BJ2 = _block_ranges(_overlap(options, rows, shape.blocks).swapaxes(1, 2))
  grid = (ceil_div(k_BSGC.shape[1], shape.blocks.k), k_BSGC.shape[2], num_seqs)
  results = like(k_BSGC), like(v_BSGC)
  dk_BSGC, dv_BSGC = _call(_dkv_kernel, options, shape, grid, (ranges_BJ2, *arrays), results)
  dsink_BHT = -jnp.exp(sink_H.astype(sum_dtype)[None, :, None] - lse_BHT) * mean_BHT
  dsink_H = dsink_BHT.sum((0, 2)).astype(sink_H.dtype)
  return _Operands(dq_BTHC, dk_BSGC, dv_BSGC, dsink_H), None


_attend.defvjp(_forward, _backward)


def _partial_forward(q_BTHC, k_BSGC, v_BSGC, mask, **options: Any) -> list[jax.Array]:
  return _compute(*_prepare(q_BTHC, k_BSGC, v_BSGC, mask, **options))


def _partial_gradients(
  q_BTHC, k_BSGC, v_BSGC, mask, o_BTHC, lse_BHT, do_BTHC, **options: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  kernel_options, *rest = _prepare(q_BTHC, k_BSGC, v_BSGC, mask, **options)
  return _backward(kernel_options, (*rest, o_BTHC, lse_BHT), do_BTHC)[0][:3]


PARTIAL_ATTENTION = PartialAttention(_partial_forward, _partial_gradients)


def _overlap(options: _KernelOptions, rows: _Rows, blocks: _Blocks) -> jax.Array:
  """[B, I, J] whether any query of block i may attend any key of block j."""
  q_start = rows.q_start_1[0]
  q_first_I, q_last_I = _block_ends(rows.q_segment_BT.shape[1], blocks.q)
  k_first_J, k_last_J = _block_ends(rows.kv_segment_BS.shape[1], blocks.k)
  q_first_I, q_last_I = q_first_I + q_start, q_last_I + q_start
  reached_IJ = k_first_J[None] <= q_last_I[:, None]
  if options.window is not None:
    reached_IJ &= k_last_J[None] > q_first_I[:, None] - options.window
  q_low_BI, q_high_BI = _block_extremes(rows.q_segment_BT, blocks.q)
  k_low_BJ, k_high_BJ = _block_extremes(rows.kv_segment_BS, blocks.k)
  shared_BIJ = q_low_BI[:, :, None] <= k_high_BJ[:, None]
  shared_BIJ &= k_low_BJ[:, None] <= q_high_BI[:, :, None]
  return shared_BIJ & reached_IJ[None]


def _block_ends(num_rows: int, block: int) -> tuple[jax.Array, jax.Array]:
  """First and last row of each block."""
  first_I = block * jnp.arange(ceil_div(num_rows, block), dtype=jnp.int32)
  return first_I, jnp.minimum(first_I + block, num_rows) - 1


def _block_extremes(segment_BT: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
  """Lowest and highest segment of each block."""
  num_seqs, num_rows = segment_BT.shape
  padded_BT = jnp.pad(segment_BT, ((0, 0), (0, -num_rows % block)), mode="edge")
  segment_BIt = padded_BT.reshape(num_seqs, -1, block)
  return segment_BIt.min(-1), segment_BIt.max(-1)


def _block_ranges(overlap_BIJ: jax.Array) -> jax.Array:
  """[B, I, 2] the first block j that overlaps and the one past the last; equal if none does."""
  first_BI = jnp.argmax(overlap_BIJ, axis=2).astype(jnp.int32)
  after_BI = overlap_BIJ.shape[2] - jnp.argmax(overlap_BIJ[..., ::-1], axis=2).astype(jnp.int32)
  after_BI = jnp.where(overlap_BIJ.any(2), after_BI, first_BI)
  return jnp.stack([first_BI, after_BI], axis=2)


def _forward_kernel(*refs: Any, options: _KernelOptions, shape: _Shape) -> None:
  ranges_ref, start_ref, q_segment_ref, kv_segment_ref, q_ref, k_ref, v_ref, sink_ref = refs[:8]
  o_ref, lse_ref = refs[8:]
  # The last queries, which attend the most keys, start first.
  block, head, seq = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
  group = head // shape.heads_per_group
  rows = Range(block * shape.blocks.q, shape.blocks.q, shape.T)
  q_mC = _load_rows(q_ref, shape.key_channels, seq, rows, head)
  q_row_m1 = start_ref[0] + rows.indices[:, None]
  q_segment_m1 = load(q_segment_ref, seq, rows, other=_NO_QUERY)[:, None]
  dtype = accumulator_dtype(q_ref.dtype)

  def add_keys(j, state):
    keys = Range(j * shape.blocks.k, shape.blocks.k, shape.S)
    product_mn = _product(q_mC, _load_rows(k_ref, shape.key_channels, seq, keys, group))
    k_segment_1n = load(kv_segment_ref, seq, keys, other=_NO_KEY)[None]
    is_same_mn = q_segment_m1 == k_segment_1n
    visible_mn = _visible(options, q_row_m1, keys.indices[None], is_same_mn)
    v_nC = _load_rows(v_ref, shape.value_channels, seq, keys, group)
    return _update_softmax(state, _scores(options, product_mn)[0], visible_mn, v_nC)

  max_m = jnp.full((rows.size,), jnp.finfo(dtype).min, dtype)
  sum_m = jnp.zeros((rows.size,), dtype)
  if options.has_sinks:
    max_m, sum_m = sum_m + sink_ref[head].astype(dtype) * _LOG2_E, sum_m + 1
  o_mC = [jnp.zeros((rows.size, channels.size), dtype) for channels in shape.value_channels]
  first, after = ranges_ref[seq, block, 0], ranges_ref[seq, block, 1]
  max_m, sum_m, o_mC = jax.lax.fori_loop(first, after, add_keys, (max_m, sum_m, o_mC))
  sum_m = jnp.where(sum_m > 0, sum_m, 1)  # queries that attend nothing
  o_mC = [o_mc / sum_m[:, None] for o_mc in o_mC]
  _store_rows(o_ref, o_mC, shape.value_channels, seq, rows, head)
  store(lse_ref, (max_m + jnp.log2(sum_m)) / _LOG2_E, seq, head, rows)


def _update_softmax(state: tuple, score_mn, visible_mn, v_nC: list[jax.Array]) -> tuple:
  """(maximum, sum and weighted values of all rows' scores) with a block of keys added."""
  max_m, sum_m, o_mC = state
  score_mn = jnp.where(visible_mn, score_mn, jnp.finfo(score_mn.dtype).min)
  next_max_m = jnp.maximum(max_m, score_mn.max(1))
  p_mn = jnp.where(visible_mn, jnp.exp2(score_mn - next_max_m[:, None]), 0)
  rescale_m = jnp.exp2(max_m - next_max_m)
  rescaled_mC = [o_mc * rescale_m[:, None] for o_mc in o_mC]
  return next_max_m, sum_m * rescale_m + p_mn.sum(1), _add_products(rescaled_mC, p_mn, v_nC)


def _dq_kernel(*refs: Any, options: _KernelOptions, shape: _Shape) -> None:
  ranges_ref, start_ref, q_segment_ref, kv_segment_ref, q_ref, k_ref, v_ref, _ = refs[:8]
  do_ref, lse_ref, mean_ref, dq_ref = refs[8:]
  block, head, seq = pl.num_programs(0) - 1 - pl.program_id(0), pl.program_id(1), pl.program_id(2)
  group = head // shape.heads_per_group
  rows = Range(block * shape.blocks.q, shape.blocks.q, shape.T)
  q_mC = _load_rows(q_ref, shape.key_channels, seq, rows, head)
  do_mC = _load_rows(do_ref, shape.value_channels, seq, rows, head)
  lse_m1, mean_m1 = (load(ref, seq, head, rows)[:, None] for ref in (lse_ref, mean_ref))
  q_row_m1 = start_ref[0] + rows.indices[:, None]
  q_segment_m1 = load(q_segment_ref, seq, rows, other=_NO_QUERY)[:, None]

  def add_keys(j, dq_mC):
    keys = Range(j * shape.blocks.k, shape.blocks.k, shape.S)
    k_nC = _load_rows(k_ref, shape.key_channels, seq, keys, group)
    v_nC = _load_rows(v_ref, shape.value_channels, seq, keys, group)
    k_segment_1n = load(kv_segment_ref, seq, keys, other=_NO_KEY)[None]
    is_same_mn = q_segment_m1 == k_segment_1n
    visible_mn = _visible(options, q_row_m1, keys.indices[None], is_same_mn)
    products = _product(q_mC, k_nC), _product(do_mC, v_nC)
    _, dscore_mn = _score_gradients(options, *products, visible_mn, lse_m1, mean_m1)
    return _add_products(dq_mC, dscore_mn, k_nC)

  first, after = ranges_ref[seq, block, 0], ranges_ref[seq, block, 1]
  dq_mC = jax.lax.fori_loop(first, after, add_keys, list(map(_zeros, q_mC)))
  _store_rows(dq_ref, dq_mC, shape.key_channels, seq, rows, head)


def _dkv_kernel(*refs: Any, options: _KernelOptions, shape: _Shape) -> None:
  """Scores are transposed, so that no product needs a transposed block of scores."""
  ranges_ref, start_ref, q_segment_ref, kv_segment_ref, q_ref, k_ref, v_ref, _ = refs[:8]
  do_ref, lse_ref, mean_ref, dk_ref, dv_ref = refs[8:]
  block, group, seq = pl.program_id(0), pl.program_id(1), pl.program_id(2)
  keys = Range(block * shape.blocks.k, shape.blocks.k, shape.S)
  k_nC = _load_rows(k_ref, shape.key_channels, seq, keys, group)
  v_nC = _load_rows(v_ref, shape.value_channels, seq, keys, group)
  k_segment_n1 = load(kv_segment_ref, seq, keys, other=_NO_KEY)[:, None]
  q_start = start_ref[0]
  first, after = ranges_ref[seq, block, 0], ranges_ref[seq, block, 1]

  def add_queries(i, sums):
    head = group * shape.heads_per_group + i // (after - first)
    rows = Range((first + i % (after - first)) * shape.blocks.q, shape.blocks.q, shape.T)
    q_mC = _load_rows(q_ref, shape.key_channels, seq, rows, head)
    do_mC = _load_rows(do_ref, shape.value_channels, seq, rows, head)
    lse_1m, mean_1m = (load(ref, seq, head, rows)[None] for ref in (lse_ref, mean_ref))
    is_same_nm = load(q_segment_ref, seq, rows, other=_NO_QUERY)[None] == k_segment_n1
    q_row_1m = q_start + rows.indices[None]
    visible_nm = _visible(options, q_row_1m, keys.indices[:, None], is_same_nm)
    products = _product(k_nC, q_mC), _product(v_nC, do_mC)
    p_nm, dscore_nm = _score_gradients(options, *products, visible_nm, lse_1m, mean_1m)
    return _add_products(sums[0], dscore_nm, q_mC), _add_products(sums[1], p_nm, do_mC)

  sums = list(map(_zeros, k_nC)), list(map(_zeros, v_nC))
  num_steps = (after - first) * shape.heads_per_group
  dk_nC, dv_nC = jax.lax.fori_loop(0, num_steps, add_queries, sums)
  _store_rows(dk_ref, dk_nC, shape.key_channels, seq, keys, group)
  _store_rows(dv_ref, dv_nC, shape.value_channels, seq, keys, group)


def _load_rows(ref, channels: tuple[Range, ...], seq, rows: Range, head) -> list[jax.Array]:
  return [load(ref, seq, rows, head, each) for each in channels]


def _store_rows(ref, x_C: list[jax.Array], channels: tuple[Range, ...], seq, rows, head) -> None:
  for x, each in zip(x_C, channels, strict=True):
    store(ref, x, seq, rows, head, each)


def _scores(options: _KernelOptions, product: jax.Array) -> tuple[jax.Array, jax.Array | float]:
  """(scores in base 2, derivative of the natural ones by the product of query and key)."""
  if not options.soft_cap:
    return product * (options.scale * _LOG2_E), options.scale
  ratio = jnp.tanh(product * (options.scale / options.soft_cap))
  return ratio * (options.soft_cap * _LOG2_E), (1 - ratio * ratio) * options.scale


def _score_gradients(
  options: _KernelOptions, product, dp, visible, lse, mean
) -> tuple[jax.Array, jax.Array]:
  """(probabilities, gradient of the product of query and key)."""
  score, slope = _scores(options, product)
  p = jnp.where(visible, jnp.exp2(score - lse * _LOG2_E), 0)
  return p, p * (dp - mean) * slope


def _visible(options: _KernelOptions, q_row, k_row, is_same_segment) -> jax.Array:
  visible = is_same_segment & (k_row <= q_row)
  return visible if options.window is None else visible & (q_row - k_row < options.window)


def _product(a_mC: list[jax.Array], b_nC: list[jax.Array]) -> jax.Array:
  """[m, n] the product over channels that are split alike."""
  products = (block_dot(a, b, 1, 1) for a, b in zip(a_mC, b_nC, strict=True))
  return functools.reduce(jnp.add, products)


def _add_products(sum_C: list[jax.Array], weights: jax.Array, x_C: list[jax.Array]) -> list:
  return [
    total + block_dot(weights.astype(x.dtype), x, 1, 0) for total, x in zip(sum_C, x_C, strict=True)
  ]


def _zeros(x: jax.Array) -> jax.Array:
  return jnp.zeros(x.shape, accumulator_dtype(x.dtype))


def _shape(operands: _Operands, blocks: _Blocks) -> _Shape:
  num_queries, num_keys = operands.q_BTHC.shape[1], operands.k_BSGC.shape[1]
  num_heads, num_groups = operands.q_BTHC.shape[2], operands.k_BSGC.shape[2]
  fit = lambda block, size: min(block, max(pl.next_power_of_2(size), _MIN_SIDE))
  return _Shape(
    *(num_queries, num_keys, num_heads // num_groups),
    *(_split_channels(x.shape[3]) for x in (operands.k_BSGC, operands.v_BSGC)),
    _Blocks(fit(blocks.q, num_queries), fit(blocks.k, num_keys)),
  )


def _split_channels(num_channels: int) -> tuple[Range, ...]:
  """The channels in powers of two, the largest first; other than multiples of 16 are padded."""
  if num_channels % _MIN_SIDE:
    return (Range(0, max(pl.next_power_of_2(num_channels), _MIN_SIDE), num_channels),)
  ranges, start = [], 0
  while start < num_channels:
    size = 1 << ((num_channels - start).bit_length() - 1)
    ranges.append(Range(start, size, start + size))
    start += size
  return tuple(ranges)


def _call(
  kernel: Callable, options: _KernelOptions, shape: _Shape, grid: tuple[int, ...], arrays, results
) -> list[jax.Array]:
  """The kernel's results, with as many pipeline stages as shared memory holds."""
  num_channels = sum(c.size for c in (*shape.key_channels, *shape.value_channels))
  stage_bytes = min(shape.blocks) * num_channels * results[0].dtype.itemsize
  params = plt.CompilerParams(
    num_warps=8 if max(shape.blocks) * num_channels >= 128 * 256 else 4,
    num_stages=min(max(_STAGE_BYTES // stage_bytes, 1), 3),
  )
  call = pl.pallas_call(
    functools.partial(kernel, options=options, shape=shape),
    grid=grid,
    out_shape=results,
    compiler_params=params,
    interpret=options.interpret,
    name=kernel.__name__.strip("_"),
  )
  with stated_cost(_cost(kernel, options.window, shape, arrays, results)):
    return call(*arrays)


# Products of a block of queries with a block of keys: how many sum over, or produce, the channels
# of the keys, and how many those of the values.
_PRODUCTS = {_forward_kernel: (1, 1), _dq_kernel: (2, 1), _dkv_kernel: (2, 2)}


def _cost(kernel: Callable, window: int | None, shape: _Shape, arrays, results) -> StatedCost:
  """The cost of all programs; blocks that several of them read stay in the L2 cache."""
  num_seqs, _, num_heads, _ = arrays[4].shape  # of the queries
  channels = (sum(c.size for c in each) for each in (shape.key_channels, shape.value_channels))
  summed = sum(map(math.prod, zip(_PRODUCTS[kernel], channels, strict=True)))
  flops = 2 * num_seqs * num_heads * _num_scores(shape, window) * summed
  return StatedCost(flops, 0, sum(x.size * x.dtype.itemsize for x in (*arrays, *results)))


def _num_scores(shape: _Shape, window: int | None) -> float:
  """Scores of a head in the blocks that are visited if a sequence is one document.

  Queries count as spread evenly over the keys, as all those of a context axis are.
  """
  (q, k), reach, num_blocks = shape.blocks, window or shape.S, 0
  for first in range(0, shape.S, q):
    last = min(first + q, shape.S) - 1
    num_blocks += last // k - max(first - reach + 1, 0) // k + 1
  return num_blocks * q * k * shape.T / shape.S
