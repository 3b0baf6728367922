"""Blockwise attention: memory linear in T, on any platform, in plain JAX.

The forward pass saves the output and the log-sum-exp of each row; the backward pass recomputes a
block's scores from them. Queries aligned with the keys are split into spans; a span attends only
the keys from its first query's window to its end, and is a loop over its blocks of queries. Other
queries are one span, and each of its blocks chooses one of a few ranges of keys. Within a block,
the query heads that share a key/value head are stacked along the rows: lower-case `r` counts the
H/G * t rows of its t queries.

Every dot has the form that XLA:CPU executes in bfloat16 (kernels/xla_cpu.py): a float32 result, and
a left operand that contracts its last axis. The gradients of k and v are therefore computed
transposed, which transposes [r, C] rather than [r, S].
"""

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.attention.reference import (
  RESIDUAL_NAME,
  AttentionMask,
  PartialAttention,
  ScoreOptions,
  visible,
)
from maxlite.kernels.numerics import accumulator_dtype, apply_soft_cap, ceil_div, dot, sum_arrays

_MAX_SPANS = 8  # compile time grows with it; 8 spans compute 56 % of all scores, 16 would 53 %


class _Options(NamedTuple):
  scale: float
  soft_cap: float
  block: int  # queries per block
  is_aligned: bool  # queries and keys are the same rows
  window: int | None
  first_key: int = 0  # row of the first of the given keys


# Integers that belong to rows; None in a tuple of gradients.
_Integers = TypeVar("_Integers", jax.Array, None)


class _QueryArrays(NamedTuple, Generic[_Integers]):
  q_BTHC: jax.Array
  segment_BT: _Integers
  row_BT: _Integers


class _KeyArrays(NamedTuple, Generic[_Integers]):
  k_BGSC: jax.Array
  v_BGSC: jax.Array
  segment_BS: _Integers
  sink_H: jax.Array | None


_Queries = _QueryArrays[jax.Array]
_Keys = _KeyArrays[jax.Array]


class _Results(NamedTuple):
  """The output, and the log-sum-exp of each row's scores."""

  o_BTHC: jax.Array
  lse_BTH1: jax.Array


class _Block(Protocol):
  """The operands of a scan's body: a block of queries and what belongs to them."""

  @property
  def queries(self) -> _Queries: ...


class _ForwardBlock(NamedTuple):
  queries: _Queries


class _BackwardBlock(NamedTuple):
  queries: _Queries
  results: _Results
  do_BTHC: jax.Array


class _KeyGradients(NamedTuple):
  """Sums over blocks of queries, in the accumulator type; None without sinks."""

  dk_BGSC: jax.Array
  dv_BGSC: jax.Array
  dsink_H: jax.Array | None


_BlockType = TypeVar("_BlockType", bound=_Block)
_Carry = TypeVar("_Carry")  # of a scan over blocks
_Result = TypeVar("_Result")  # of a block


class _Span(NamedTuple):
  """Queries [start, stop) and the only keys that they can attend."""

  start: int
  stop: int
  first_key: int
  stop_key: int

  def rows(self, block: _BlockType) -> _BlockType:
    """The span's queries of every array [B, T, ...] of `block`."""
    return jax.tree.map(lambda x_BT: x_BT[:, self.start : self.stop], block)

  def keys(self, keys: _Keys) -> _Keys:
    rows = slice(self.first_key, self.stop_key)
    return keys._replace(
      k_BGSC=keys.k_BGSC[:, :, rows],
      v_BGSC=keys.v_BGSC[:, :, rows],
      segment_BS=keys.segment_BS[:, rows],
    )


# The body of a scan over blocks of queries for given keys, of which the first is the span's key
# number `first`: body(options, keys, first, carry, block) -> (carry, result of the block).
_QueryBlockBody = Callable[[_Options, _Keys, int, _Carry, _BlockType], tuple[_Carry, _Result]]


def attention(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  score: ScoreOptions,
) -> jax.Array:
  """o_BTHC in q's type."""
  num_queries = q_BTHC.shape[1]
  starts_at_zero = isinstance(mask.q_start, int) and mask.q_start == 0
  options = _Options(
    scale=score.scale,
    soft_cap=score.soft_cap,
    block=min(score.block_q, num_queries),
    is_aligned=starts_at_zero and num_queries == k_BSGC.shape[1],
    window=mask.window,
  )
  return _attend(options, _queries(q_BTHC, mask), _keys(k_BSGC, v_BSGC, mask, score.sink_H))


def _queries(q_BTHC: jax.Array, mask: AttentionMask) -> _Queries:
  return _Queries(q_BTHC, mask.q_segment_BT, mask.q_row_BT)


def _keys(
  k_BSGC: jax.Array, v_BSGC: jax.Array, mask: AttentionMask, sink_H: jax.Array | None
) -> _Keys:
  return _Keys(k_BSGC.swapaxes(1, 2), v_BSGC.swapaxes(1, 2), mask.kv_segment_BS, sink_H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, queries: _Queries, keys: _Keys) -> jax.Array:
  o_BTHC, _ = _forward(options, queries, keys)
  return o_BTHC


class _ChunkedResiduals(NamedTuple):
  """What the backward pass reads."""

  queries: _Queries
  keys: _Keys
  results: _Results


def _forward(
  options: _Options, queries: _Queries, keys: _Keys
) -> tuple[jax.Array, _ChunkedResiduals]:
  """Returns o_BTHC, and what the backward pass reads."""
  results = checkpoint_name(_compute(options, queries, keys), RESIDUAL_NAME)
  return results.o_BTHC, _ChunkedResiduals(queries, keys, results)


def _compute(options: _Options, queries: _Queries, keys: _Keys) -> _Results:
  o_spans = []
  lse_spans = []
  for span in _spans(options, queries, keys):
    body = _with_keys_in_reach(_forward_block, options, span, keys)
    blocks = _split(span.rows(_ForwardBlock(queries)), options.block)
    _, results = _scan(body, (), blocks)
    o_spans.append(_join(results.o_BTHC, span))
    lse_spans.append(_join(results.lse_BTH1, span))
  return _Results(jnp.concatenate(o_spans, axis=1), jnp.concatenate(lse_spans, axis=1))


def _backward(
  options: _Options, residuals: _ChunkedResiduals, do_BTHC: jax.Array
) -> tuple[_QueryArrays[None], _KeyArrays[None]]:
  """(gradients of the queries, gradients of the keys and sinks)"""
  queries, keys, results = residuals
  sum_dtype = accumulator_dtype(do_BTHC.dtype)
  dsink_H = None
  if keys.sink_H is not None:
    dsink_H = jnp.zeros_like(keys.sink_H, dtype=sum_dtype)
  dq_spans = []
  dk_spans = []
  dv_spans = []
  for span in _spans(options, queries, keys):
    span_keys = span.keys(keys)
    zeros = _KeyGradients(
      dk_BGSC=jnp.zeros_like(span_keys.k_BGSC, dtype=sum_dtype),
      dv_BGSC=jnp.zeros_like(span_keys.v_BGSC, dtype=sum_dtype),
      dsink_H=dsink_H,
    )
    body = _with_keys_in_reach(_backward_block, options, span, keys)
    blocks = _split(span.rows(_BackwardBlock(queries, results, do_BTHC)), options.block)
    sums, dq_nBtHC = _scan(body, zeros, blocks)
    dsink_H = sums.dsink_H
    dq_spans.append(_join(dq_nBtHC, span))
    dk_spans.append(_pad_to_all_keys(sums.dk_BGSC, span, keys))
    dv_spans.append(_pad_to_all_keys(sums.dv_BGSC, span, keys))
  if dsink_H is not None and keys.sink_H is not None:
    dsink_H = dsink_H.astype(keys.sink_H.dtype)
  dkeys = _KeyArrays(
    k_BGSC=sum_arrays(dk_spans).astype(do_BTHC.dtype),
    v_BGSC=sum_arrays(dv_spans).astype(do_BTHC.dtype),
    segment_BS=None,
    sink_H=dsink_H,
  )
  dqueries = _QueryArrays(jnp.concatenate(dq_spans, axis=1), segment_BT=None, row_BT=None)
  return dqueries, dkeys


_attend.defvjp(_forward, _backward)


def _pad_to_all_keys(x_BGSC: jax.Array, span: _Span, keys: _Keys) -> jax.Array:
  """An array over the span's keys as one over all keys, zero for the others."""
  after = keys.k_BGSC.shape[2] - span.stop_key
  return jnp.pad(x_BGSC, ((0, 0), (0, 0), (span.first_key, after), (0, 0)))


def _partial_options(q_BTHC: jax.Array, mask: AttentionMask, score: ScoreOptions) -> _Options:
  return _Options(
    scale=score.scale,
    soft_cap=score.soft_cap,
    block=min(score.block_q, q_BTHC.shape[1]),
    is_aligned=False,
    window=mask.window,
  )


def _partial_forward(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  score: ScoreOptions,
) -> tuple[jax.Array, jax.Array]:
  options = _partial_options(q_BTHC, mask, score)
  keys = _keys(k_BSGC, v_BSGC, mask, sink_H=None)
  results = _compute(options, _queries(q_BTHC, mask), keys)
  return results.o_BTHC, results.lse_BTH1[..., 0].swapaxes(1, 2)


def _partial_gradients(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  score: ScoreOptions,
  o_BTHC: jax.Array,
  lse_BHT: jax.Array,
  do_BTHC: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  options = _partial_options(q_BTHC, mask, score)
  keys = _keys(k_BSGC, v_BSGC, mask, sink_H=None)
  results = _Results(o_BTHC, lse_BHT.swapaxes(1, 2)[..., None])
  residuals = _ChunkedResiduals(_queries(q_BTHC, mask), keys, results)
  dqueries, dkeys = _backward(options, residuals, do_BTHC)
  return dqueries.q_BTHC, dkeys.k_BGSC.swapaxes(1, 2), dkeys.v_BGSC.swapaxes(1, 2)


PARTIAL_ATTENTION = PartialAttention(_partial_forward, _partial_gradients)


def _forward_block(
  options: _Options, keys: _Keys, _first: int, _carry: tuple[()], block: _ForwardBlock
) -> tuple[tuple[()], _Results]:
  """The body of the forward pass's scan, which carries nothing."""
  queries = block.queries
  num_queries = queries.row_BT.shape[1]
  score_BGrS, _ = _scores(options, queries, keys)
  max_BGr1 = score_BGrS.max(-1, keepdims=True)
  if keys.sink_H is not None:
    max_BGr1 = jnp.maximum(max_BGr1, _sink_scores(keys.sink_H, queries, keys))
  p_BGrS = jnp.exp(score_BGrS - max_BGr1)
  sum_BGr1 = p_BGrS.sum(-1, keepdims=True)
  if keys.sink_H is not None:
    sum_BGr1 += jnp.exp(_sink_scores(keys.sink_H, queries, keys) - max_BGr1)
  # Normalised after the sum over keys: C divisions per row instead of S.
  o_BGrC = dot(p_BGrS.astype(keys.v_BGSC.dtype), keys.v_BGSC, (3, 2), 2) / sum_BGr1
  lse_BGr1 = max_BGr1 + jnp.log(sum_BGr1)
  results = _Results(
    o_BTHC=_unfold(o_BGrC.astype(queries.q_BTHC.dtype), num_queries),
    lse_BTH1=_unfold(lse_BGr1, num_queries),
  )
  return (), results


def _backward_block(
  options: _Options, keys: _Keys, first: int, sums: _KeyGradients, block: _BackwardBlock
) -> tuple[_KeyGradients, jax.Array]:
  """(gradients of keys and sinks including this block's, dq_BtHC): the backward pass's body.

  The gradients are of all keys of the span, of which `keys` are those from `first` on.
  """
  dtype = block.do_BTHC.dtype
  sum_dtype = accumulator_dtype(dtype)
  q_BGrC = _fold(block.queries.q_BTHC, keys)
  o_BGrC = _fold(block.results.o_BTHC, keys)
  lse_BGr1 = _fold(block.results.lse_BTH1, keys)
  do_BGrC = _fold(block.do_BTHC, keys)
  mean_BGr1 = (do_BGrC.astype(sum_dtype) * o_BGrC.astype(sum_dtype)).sum(-1, keepdims=True)
  score_BGrS, slope_BGrS = _scores(options, block.queries, keys)
  p_BGrS = jnp.exp(score_BGrS - lse_BGr1)
  dp_BGrS = dot(do_BGrC, keys.v_BGSC, (3, 3), 2)
  dscore_BGrS = (p_BGrS * (dp_BGrS - mean_BGr1) * slope_BGrS).astype(dtype)
  dq_BGrC = dot(dscore_BGrS, keys.k_BGSC, (3, 2), 2).astype(dtype)
  dk_BGCS = dot(q_BGrC.swapaxes(2, 3), dscore_BGrS, (3, 2), 2)
  dv_BGCS = dot(do_BGrC.swapaxes(2, 3), p_BGrS.astype(dtype), (3, 2), 2)
  dsink_H = sums.dsink_H
  if dsink_H is not None and keys.sink_H is not None:
    sink_1Gr1 = _sink_scores(keys.sink_H, block.queries, keys)
    dsink_BGr1 = -jnp.exp(sink_1Gr1 - lse_BGr1) * mean_BGr1
    dsink_H += _sum_per_head(dsink_BGr1, block.queries.row_BT.shape[1])
  sums = _KeyGradients(
    dk_BGSC=_add_from(first, sums.dk_BGSC, dk_BGCS),
    dv_BGSC=_add_from(first, sums.dv_BGSC, dv_BGCS),
    dsink_H=dsink_H,
  )
  return sums, _unfold(dq_BGrC, block.queries.row_BT.shape[1])


def _sum_per_head(x_BGr1: jax.Array, num_queries: int) -> jax.Array:
  """x_H: sums over sequences and queries."""
  num_seqs, num_kv_heads = x_BGr1.shape[:2]
  x_BGht = x_BGr1.reshape(num_seqs, num_kv_heads, -1, num_queries)
  return x_BGht.sum((0, 3)).ravel()


def _add_from(first: int, total_BGSC: jax.Array, part_BGCS: jax.Array) -> jax.Array:
  """`total_BGSC` with a part added to the keys from `first` on."""
  num_keys = part_BGCS.shape[3]
  part_BGSC = total_BGSC[:, :, first : first + num_keys] + part_BGCS.swapaxes(2, 3)
  if num_keys == total_BGSC.shape[2]:
    return part_BGSC
  return jax.lax.dynamic_update_slice_in_dim(total_BGSC, part_BGSC, first, axis=2)


def _sink_scores(sink_H: jax.Array, queries: _Queries, keys: _Keys) -> jax.Array:
  """score_1Gr1 of the sinks."""
  num_kv_heads = keys.k_BGSC.shape[1]
  num_queries = queries.row_BT.shape[1]
  sum_dtype = accumulator_dtype(keys.k_BGSC.dtype)
  sink_Gh1 = sink_H.astype(sum_dtype).reshape(num_kv_heads, -1, 1)
  return jnp.repeat(sink_Gh1, num_queries, axis=2).reshape(1, num_kv_heads, -1, 1)


def _scores(
  options: _Options, queries: _Queries, keys: _Keys
) -> tuple[jax.Array, jax.Array | float]:
  """(score_BGrS, derivative of the scores with respect to the product of query and key).

  Scores of invisible keys are very low, but finite.
  """
  product_BGrS = dot(_fold(queries.q_BTHC, keys), keys.k_BGSC, (3, 3), 2)
  shape_BGrS = product_BGrS.shape
  num_seqs, num_kv_heads, _, num_keys = shape_BGrS
  num_queries = queries.row_BT.shape[1]
  product_BGhtS = product_BGrS.reshape(num_seqs, num_kv_heads, -1, num_queries, num_keys)
  row_BT = queries.row_BT - options.first_key
  visible_BtS = visible(row_BT, queries.segment_BT, keys.segment_BS, options.window)
  score_BGhtS = apply_soft_cap(product_BGhtS * options.scale, options.soft_cap)
  slope: jax.Array | float = options.scale
  if options.soft_cap:
    cap_slope_BGhtS = 1 - jnp.square(score_BGhtS / options.soft_cap)
    slope = options.scale * cap_slope_BGhtS.reshape(shape_BGrS)
  lowest = jnp.finfo(product_BGrS.dtype).min
  score_BGhtS = jnp.where(visible_BtS[:, None, None], score_BGhtS, lowest)
  return score_BGhtS.reshape(shape_BGrS), slope


def _spans(options: _Options, queries: _Queries, keys: _Keys) -> list[_Span]:
  num_queries = queries.row_BT.shape[1]
  num_keys = keys.segment_BS.shape[1]
  if not options.is_aligned:
    return [_Span(0, num_queries, 0, num_keys)]
  num_blocks = ceil_div(num_queries, options.block)
  length = ceil_div(num_blocks, _MAX_SPANS) * options.block
  reach = num_queries
  if options.window is not None:
    reach = options.window - 1  # keys before a query
  spans = []
  for start in range(0, num_queries, length):
    stop = min(start + length, num_queries)
    spans.append(_Span(start, stop, max(start - reach, 0), stop))
  return spans


def _with_keys_in_reach(
  function: _QueryBlockBody[_Carry, _BlockType, _Result],
  options: _Options,
  span: _Span,
  keys: _Keys,
) -> Callable[[_Carry, _BlockType], tuple[_Carry, _Result]]:
  """The body of a scan over a span's blocks: `function(options, keys, first, carry, block)`.

  Its keys are those of the span from `first` on that the block may attend, in one of a few ranges
  unless queries and keys are aligned.
  """
  num_queries = span.stop - span.start
  num_keys = span.stop_key - span.first_key
  num_ranges = 1
  if not options.is_aligned:
    num_ranges = max(min(num_keys // num_queries, _MAX_SPANS), 1)
  length = ceil_div(num_keys, num_ranges)
  reach = num_keys
  if options.window is not None:
    # A block's first row may be in the range before that of its last row.
    reach = options.window + options.block - 2
  bodies = []
  for start in range(0, num_keys, length):
    first = max(start - reach, 0)
    stop = min(start + length, num_keys)
    part = span._replace(first_key=span.first_key + first, stop_key=span.first_key + stop)
    own_options = options._replace(first_key=part.first_key)
    bodies.append(functools.partial(function, own_options, part.keys(keys), first))
  if len(bodies) == 1:
    return bodies[0]

  def body(carry: _Carry, block: _BlockType) -> tuple[_Carry, _Result]:
    last_range = jnp.clip(block.queries.row_BT.max() // length, 0, len(bodies) - 1)
    return jax.lax.switch(last_range, bodies, carry, block)

  return body


def _scan(
  body: Callable[[_Carry, _BlockType], tuple[_Carry, _Result]], carry: _Carry, blocks: _BlockType
) -> tuple[_Carry, _Result]:
  num_blocks = blocks.queries.row_BT.shape[0]
  # For a single block, an unroll beyond the length removes the loop and its copy of the carry.
  unroll = 2 if num_blocks == 1 else 1
  return jax.lax.scan(body, carry, blocks, unroll=unroll)


def _split(blocks: _BlockType, block: int) -> _BlockType:
  """Each [B, T, ...] as blocks [n, B, t, ...]; the last one is padded with zeros."""

  def split(x_BT: jax.Array) -> jax.Array:
    padding = [(0, 0)] * x_BT.ndim
    padding[1] = (0, -x_BT.shape[1] % block)
    x_BT = jnp.pad(x_BT, padding)
    x_Bnt = x_BT.reshape(x_BT.shape[0], -1, block, *x_BT.shape[2:])
    return x_Bnt.swapaxes(0, 1)

  return jax.tree.map(split, blocks)


def _join(x_nBtHC: jax.Array, span: _Span) -> jax.Array:
  """The inverse of `_split` for one [B, T, H, C], without the padding."""
  num_seqs, _, num_heads, num_channels = x_nBtHC.shape[1:]
  x_BTHC = x_nBtHC.swapaxes(0, 1).reshape(num_seqs, -1, num_heads, num_channels)
  return x_BTHC[:, : span.stop - span.start]


def _fold(x_BtHC: jax.Array, keys: _Keys) -> jax.Array:
  """x_BGrC: the heads that share a key/value head, stacked along the rows."""
  num_seqs, num_queries, _, num_channels = x_BtHC.shape
  num_kv_heads = keys.k_BGSC.shape[1]
  x_BtGhC = x_BtHC.reshape(num_seqs, num_queries, num_kv_heads, -1, num_channels)
  x_BGhtC = x_BtGhC.transpose(0, 2, 3, 1, 4)
  return x_BGhtC.reshape(num_seqs, num_kv_heads, -1, num_channels)


def _unfold(x_BGrC: jax.Array, num_queries: int) -> jax.Array:
  """x_BtHC: the inverse of `_fold`."""
  num_seqs, num_kv_heads, _, num_channels = x_BGrC.shape
  x_BGhtC = x_BGrC.reshape(num_seqs, num_kv_heads, -1, num_queries, num_channels)
  x_BtGhC = x_BGhtC.transpose(0, 3, 1, 2, 4)
  return x_BtGhC.reshape(num_seqs, num_queries, -1, num_channels)
