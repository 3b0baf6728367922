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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.attention.reference import (
  RESIDUAL_NAME,
  AttentionMask,
  PartialAttention,
  visible,
)
from maxlite.kernels.numerics import accumulator_dtype, apply_soft_cap, ceil_div, dot

_MAX_SPANS = 8  # compile time grows with it; 8 spans compute 56 % of all scores, 16 would 53 %


class _Options(NamedTuple):
  scale: float
  soft_cap: float
  block: int
  is_aligned: bool  # queries and keys are the same rows
  window: int | None
  first_key: int = 0  # row of the first of the given keys


class _Queries(NamedTuple):
  q_BTHC: jax.Array
  segment_BT: jax.Array
  row_BT: jax.Array


class _Keys(NamedTuple):
  k_BGSC: jax.Array
  v_BGSC: jax.Array
  segment_BS: jax.Array
  sink_H: jax.Array | None


class _Span(NamedTuple):
  """Queries [start, stop) and the only keys that they can attend."""

  start: int
  stop: int
  first_key: int
  stop_key: int

  def queries(self, tree: Any) -> Any:
    return jax.tree.map(lambda x_BT: x_BT[:, self.start : self.stop], tree)

  def keys(self, keys: _Keys) -> _Keys:
    rows = slice(self.first_key, self.stop_key)
    return keys._replace(
      k_BGSC=keys.k_BGSC[:, :, rows],
      v_BGSC=keys.v_BGSC[:, :, rows],
      segment_BS=keys.segment_BS[:, rows],
    )


def attention(q_BTHC, k_BSGC, v_BSGC, mask: AttentionMask, **options: Any) -> jax.Array:
  """o_BTHC in q's type; options as in `_prepare`."""
  return _attend(*_prepare(q_BTHC, k_BSGC, v_BSGC, mask, **options))


def _prepare(
  q_BTHC, k_BSGC, v_BSGC, mask, *, scale, block_q, soft_cap, sink_H=None
) -> tuple[_Options, _Queries, _Keys]:
  num_queries, num_keys = q_BTHC.shape[1], k_BSGC.shape[1]
  is_aligned = isinstance(mask.q_start, int) and mask.q_start == 0 and num_queries == num_keys
  queries = _Queries(q_BTHC, mask.q_segment_BT, mask.q_row_BT)
  k_BGSC, v_BGSC = k_BSGC.swapaxes(1, 2), v_BSGC.swapaxes(1, 2)
  keys = _Keys(k_BGSC, v_BGSC, mask.kv_segment_BS, sink_H)
  options = _Options(scale, soft_cap, min(block_q, num_queries), is_aligned, mask.window)
  return options, queries, keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: _Options, queries: _Queries, keys: _Keys) -> jax.Array:
  return _forward(options, queries, keys)[0]


def _forward(options, queries, keys):
  """(o_BTHC, residuals)"""
  results = checkpoint_name(_compute(options, queries, keys), RESIDUAL_NAME)
  return results[0], (queries, keys, *results)


def _compute(options, queries, keys):
  """(o_BTHC, lse_BTH1)"""
  results = []
  for span in _spans(options, queries, keys):
    body = _with_keys_in_reach(_forward_block, options, span, keys)
    _, blocks = _scan(body, (), _split((span.queries(queries),), options.block))
    results.append([_join(x_nBtHC, span) for x_nBtHC in blocks])
  return [jnp.concatenate(parts, axis=1) for parts in zip(*results, strict=True)]


def _backward(options, residuals, do_BTHC):
  queries, keys, *results = residuals
  sum_dtype = accumulator_dtype(do_BTHC.dtype)
  dq_spans, dkv_spans = [], []
  dsink_H = None if keys.sink_H is None else jnp.zeros_like(keys.sink_H, dtype=sum_dtype)
  for span in _spans(options, queries, keys):
    kv = span.keys(keys)
    zeros = [jnp.zeros_like(x, dtype=sum_dtype) for x in (kv.k_BGSC, kv.v_BGSC)]
    blocks = _split(span.queries((queries, *results, do_BTHC)), options.block)
    body = _with_keys_in_reach(_backward_block, options, span, keys)
    (dkv, dsink_H), dq_nBtHC = _scan(body, (zeros, dsink_H), blocks)
    missing = (span.first_key, keys.k_BGSC.shape[2] - span.stop_key)
    dkv_spans.append([jnp.pad(x, ((0, 0), (0, 0), missing, (0, 0))) for x in dkv])
    dq_spans.append(_join(dq_nBtHC, span))
  dk_BGSC, dv_BGSC = (sum(parts).astype(do_BTHC.dtype) for parts in zip(*dkv_spans, strict=True))
  dsink_H = None if dsink_H is None else dsink_H.astype(keys.sink_H.dtype)
  dqueries = _Queries(jnp.concatenate(dq_spans, axis=1), None, None)
  return dqueries, _Keys(dk_BGSC, dv_BGSC, None, dsink_H)


_attend.defvjp(_forward, _backward)


def _partial_forward(q_BTHC, k_BSGC, v_BSGC, mask, **keys: Any) -> tuple[jax.Array, jax.Array]:
  options, *operands = _prepare(q_BTHC, k_BSGC, v_BSGC, mask, **keys)
  o_BTHC, lse_BTH1 = _compute(options._replace(is_aligned=False), *operands)
  return o_BTHC, lse_BTH1[..., 0].swapaxes(1, 2)


def _partial_gradients(
  q_BTHC, k_BSGC, v_BSGC, mask, o_BTHC, lse_BHT, do_BTHC, **keys: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  options, *operands = _prepare(q_BTHC, k_BSGC, v_BSGC, mask, **keys)
  residuals = *operands, o_BTHC, lse_BHT.swapaxes(1, 2)[..., None]
  dqueries, dkeys = _backward(options._replace(is_aligned=False), residuals, do_BTHC)
  return dqueries.q_BTHC, dkeys.k_BGSC.swapaxes(1, 2), dkeys.v_BGSC.swapaxes(1, 2)


PARTIAL_ATTENTION = PartialAttention(_partial_forward, _partial_gradients)


def _forward_block(options, keys, _first, _, block):
  """((), (o_BtHC, lse_BtH1)): the body of a scan; lse is the log-sum-exp of a row's scores."""
  (queries,) = block
  score_BGrS, _ = _scores(options, queries, keys)
  max_BGr1 = score_BGrS.max(-1, keepdims=True)
  if keys.sink_H is not None:
    max_BGr1 = jnp.maximum(max_BGr1, _sink_scores(queries, keys))
  p_BGrS = jnp.exp(score_BGrS - max_BGr1)
  sum_BGr1 = p_BGrS.sum(-1, keepdims=True)
  if keys.sink_H is not None:
    sum_BGr1 += jnp.exp(_sink_scores(queries, keys) - max_BGr1)
  # Normalised after the sum over keys: C divisions per row instead of S.
  o_BGrC = dot(p_BGrS.astype(keys.v_BGSC.dtype), keys.v_BGSC, (3, 2), 2) / sum_BGr1
  results = o_BGrC.astype(queries.q_BTHC.dtype), max_BGr1 + jnp.log(sum_BGr1)
  return (), tuple(_unfold(x_BGrC, queries.row_BT.shape[1]) for x_BGrC in results)


def _backward_block(options, keys, first, sums, block):
  """(gradients of k, v and sinks including this block's, dq_BtHC): the body of a scan.

  The gradients are of all keys of the span, of which `keys` are those from `first` on.
  """
  dkv, dsink_H = sums
  queries, o_BtHC, lse_BtH1, do_BtHC = block
  dtype = o_BtHC.dtype
  arrays = queries.q_BTHC, o_BtHC, lse_BtH1, do_BtHC
  q_BGrC, o_BGrC, lse_BGr1, do_BGrC = (_fold(x_BtHC, keys) for x_BtHC in arrays)
  sum_dtype = accumulator_dtype(dtype)
  mean_BGr1 = (do_BGrC.astype(sum_dtype) * o_BGrC.astype(sum_dtype)).sum(-1, keepdims=True)
  score_BGrS, slope_BGrS = _scores(options, queries, keys)
  p_BGrS = jnp.exp(score_BGrS - lse_BGr1)
  dp_BGrS = dot(do_BGrC, keys.v_BGSC, (3, 3), 2)
  dscore_BGrS = (p_BGrS * (dp_BGrS - mean_BGr1) * slope_BGrS).astype(dtype)
  dq_BGrC = dot(dscore_BGrS, keys.k_BGSC, (3, 2), 2).astype(dtype)
  dk_BGCS = dot(q_BGrC.swapaxes(2, 3), dscore_BGrS, (3, 2), 2)
  dv_BGCS = dot(do_BGrC.swapaxes(2, 3), p_BGrS.astype(dtype), (3, 2), 2)
  dkv = [_add_from(first, *pair) for pair in zip(dkv, (dk_BGCS, dv_BGCS), strict=True)]
  if dsink_H is not None:
    dsink_BGr1 = -jnp.exp(_sink_scores(queries, keys) - lse_BGr1) * mean_BGr1
    dsink_H += dsink_BGr1.reshape(*dsink_BGr1.shape[:2], -1, o_BtHC.shape[1]).sum((0, 3)).ravel()
  return (dkv, dsink_H), _unfold(dq_BGrC, o_BtHC.shape[1])


def _add_from(first: int, total_BGSC: jax.Array, part_BGCS: jax.Array) -> jax.Array:
  """`total_BGSC` with a part added to the keys from `first` on."""
  part_BGSC, num_keys = part_BGCS.swapaxes(2, 3), part_BGCS.shape[3]
  part_BGSC = total_BGSC[:, :, first : first + num_keys] + part_BGSC
  if num_keys == total_BGSC.shape[2]:
    return part_BGSC
  return jax.lax.dynamic_update_slice_in_dim(total_BGSC, part_BGSC, first, axis=2)


def _sink_scores(queries: _Queries, keys: _Keys) -> jax.Array:
  """score_1Gr1 of the sinks."""
  num_kv_heads, sum_dtype = keys.k_BGSC.shape[1], accumulator_dtype(keys.k_BGSC.dtype)
  sink_Gh1 = keys.sink_H.astype(sum_dtype).reshape(num_kv_heads, -1, 1)
  return jnp.repeat(sink_Gh1, queries.row_BT.shape[1], axis=2).reshape(1, num_kv_heads, -1, 1)


def _scores(options: _Options, queries: _Queries, keys: _Keys) -> tuple:
  """(score_BGrS, derivative of the scores with respect to the product of query and key).

  Scores of invisible keys are very low, but finite.
  """
  score_BGrS = dot(_fold(queries.q_BTHC, keys), keys.k_BGSC, (3, 3), 2)
  num_seqs, num_kv_heads, _, num_keys = score_BGrS.shape
  score_BGhtS = score_BGrS.reshape(num_seqs, num_kv_heads, -1, queries.row_BT.shape[1], num_keys)
  row_BT = queries.row_BT - options.first_key
  visible_BtS = visible(row_BT, queries.segment_BT, keys.segment_BS, options.window)
  slope = options.scale
  score_BGhtS = apply_soft_cap(score_BGhtS * options.scale, options.soft_cap)
  if options.soft_cap:
    slope *= (1 - jnp.square(score_BGhtS / options.soft_cap)).reshape(score_BGrS.shape)
  lowest = jnp.finfo(score_BGrS.dtype).min
  score_BGhtS = jnp.where(visible_BtS[:, None, None], score_BGhtS, lowest)
  return score_BGhtS.reshape(score_BGrS.shape), slope


def _spans(options: _Options, queries: _Queries, keys: _Keys) -> list[_Span]:
  num_queries, num_keys = queries.row_BT.shape[1], keys.segment_BS.shape[1]
  if not options.is_aligned:
    return [_Span(0, num_queries, 0, num_keys)]
  num_blocks = ceil_div(num_queries, options.block)
  length = ceil_div(num_blocks, _MAX_SPANS) * options.block
  reach = num_queries if options.window is None else options.window - 1  # keys before a query
  spans = []
  for start in range(0, num_queries, length):
    stop = min(start + length, num_queries)
    spans.append(_Span(start, stop, max(start - reach, 0), stop))
  return spans


def _with_keys_in_reach(function, options: _Options, span: _Span, keys: _Keys) -> Callable:
  """The body of a scan over a span's blocks: `function(options, keys, first, carry, block)`.

  Its keys are those of the span from `first` on that the block may attend, in one of a few ranges
  unless queries and keys are aligned.
  """
  num_queries, num_keys = span.stop - span.start, span.stop_key - span.first_key
  num_ranges = 1 if options.is_aligned else max(min(num_keys // num_queries, _MAX_SPANS), 1)
  length = ceil_div(num_keys, num_ranges)
  # A block's first row may be in the range before that of its last row.
  reach = num_keys if options.window is None else options.window + options.block - 2
  bodies = []
  for start in range(0, num_keys, length):
    first, stop = max(start - reach, 0), min(start + length, num_keys)
    part = span._replace(first_key=span.first_key + first, stop_key=span.first_key + stop)
    own_options = options._replace(first_key=part.first_key)
    bodies.append(functools.partial(function, own_options, part.keys(keys), first))

  def body(carry, block):
    last_range = jnp.clip(block[0].row_BT.max() // length, 0, len(bodies) - 1)
    return jax.lax.switch(last_range, bodies, carry, block)

  return bodies[0] if len(bodies) == 1 else body


def _scan(body, carry, blocks):
  num_blocks = jax.tree.leaves(blocks)[0].shape[0]
  # For a single block, an unroll beyond the length removes the loop and its copy of the carry.
  return jax.lax.scan(body, carry, blocks, unroll=2 if num_blocks == 1 else 1)


def _split(tree: Any, block: int) -> Any:
  """Each [B, T, ...] as blocks [n, B, t, ...]; the last one is padded with zeros."""

  def split(x_BT):
    missing = -x_BT.shape[1] % block
    x_BT = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2))
    return x_BT.reshape(x_BT.shape[0], -1, block, *x_BT.shape[2:]).swapaxes(0, 1)

  return jax.tree.map(split, tree)


def _join(x_nBtHC: jax.Array, span: _Span) -> jax.Array:
  """The inverse of `_split` for one [B, T, H, C], without the padding."""
  x_BntHC = x_nBtHC.swapaxes(0, 1)
  x_BTHC = x_BntHC.reshape(x_BntHC.shape[0], -1, *x_BntHC.shape[3:])
  return x_BTHC[:, : span.stop - span.start]


def _fold(x_BtHC: jax.Array, keys: _Keys) -> jax.Array:
  """x_BGrC: the heads that share a key/value head, stacked along the rows."""
  num_seqs, num_queries, _, num_channels = x_BtHC.shape
  num_kv_heads = keys.k_BGSC.shape[1]
  x_BtGhC = x_BtHC.reshape(num_seqs, num_queries, num_kv_heads, -1, num_channels)
  return x_BtGhC.transpose(0, 2, 3, 1, 4).reshape(num_seqs, num_kv_heads, -1, num_channels)


def _unfold(x_BGrC: jax.Array, num_queries: int) -> jax.Array:
  """x_BtHC: the inverse of `_fold`."""
  num_seqs, num_kv_heads, _, num_channels = x_BGrC.shape
  x_BGhtC = x_BGrC.reshape(num_seqs, num_kv_heads, -1, num_queries, num_channels)
  x_BtGhC = x_BGhtC.transpose(0, 3, 1, 2, 4)
  return x_BtGhC.reshape(num_seqs, num_queries, -1, num_channels)
