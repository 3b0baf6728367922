"""Attention a block of queries at a time: memory linear in T, on any platform, in plain JAX.

Forward keeps the output and each row's log-sum-exp; backward computes a block's scores again from
them. Queries that begin where the keys begin are cut into spans, each of which is shown only the
keys up to its end; a span is a loop over its blocks. In a block the query heads that share a
key/value head stand below one another: lower-case `r` counts the H/G * t rows of its t queries.

Every dot has the form that XLA:CPU runs in bfloat16 hardware: a float32 result, and a left operand
that contracts its last axis. The gradients of k and v are therefore computed transposed, which
turns round [r, C] rather than [r, S].
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.kernels.attention.reference import visible
from maxlite.kernels.soft_cap import apply_soft_cap

_MAX_SPANS = 8  # compile time grows with it; 8 spans compute 56 % of all scores, 16 would 53 %


class _Rule(NamedTuple):
  scale: float
  soft_cap: float
  block: int
  aligned: bool  # whether queries begin where keys begin, and are as many


class _Queries(NamedTuple):
  q_BTHC: jax.Array
  segment_BT: jax.Array
  row_BT: jax.Array


class _Keys(NamedTuple):
  k_BGSC: jax.Array
  v_BGSC: jax.Array
  segment_BS: jax.Array
  window: jax.Array | int | None
  sink_H: jax.Array | None


class _Span(NamedTuple):
  start: int
  stop: int
  num_keys: int  # the keys that its queries are shown: the first so many

  def queries(self, tree: Any) -> Any:
    return jax.tree.map(lambda x_BT: x_BT[:, self.start : self.stop], tree)

  def keys(self, keys: _Keys) -> _Keys:
    seen = slice(0, self.num_keys)
    return keys._replace(
      k_BGSC=keys.k_BGSC[:, :, seen],
      v_BGSC=keys.v_BGSC[:, :, seen],
      segment_BS=keys.segment_BS[:, seen],
    )


def attention(
  q_BTHC,
  k_BSGC,
  v_BSGC,
  *,
  q_segment_BT,
  kv_segment_BS,
  q_start,
  scale,
  block_q,
  window,
  soft_cap,
  sink_H,
) -> jax.Array:
  """o_BTHC in q's type."""
  num_queries, num_keys = q_BTHC.shape[1], k_BSGC.shape[1]
  aligned = isinstance(q_start, int) and q_start == 0 and num_queries == num_keys
  row_T = q_start + jnp.arange(num_queries, dtype=jnp.int32)
  queries = _Queries(q_BTHC, q_segment_BT, jnp.broadcast_to(row_T[None], q_segment_BT.shape))
  k_BGSC, v_BGSC = k_BSGC.swapaxes(1, 2), v_BSGC.swapaxes(1, 2)
  keys = _Keys(k_BGSC, v_BGSC, kv_segment_BS, window, sink_H)
  return _attend(_Rule(scale, soft_cap, min(block_q, num_queries), aligned), queries, keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: _Rule, queries: _Queries, keys: _Keys) -> jax.Array:
  return _forward(rule, queries, keys)[0]


def _forward(rule, queries, keys):
  """o_BTHC, and what the backward pass needs."""
  o_spans, lse_spans = [], []
  for span in _spans(rule, queries, keys):
    attend = functools.partial(_forward_block, rule, span.keys(keys))
    _, (o_nBtHC, lse_nBGr1) = _scan(attend, (), _cut(span.queries(queries), rule.block))
    o_spans.append(_join(o_nBtHC, span))
    lse_spans.append(lse_nBGr1)
  o_BTHC = jnp.concatenate(o_spans, axis=1)
  return o_BTHC, (queries, keys, o_BTHC, lse_spans)


def _backward(rule, saved, do_BTHC):
  queries, keys, o_BTHC, lse_spans = saved
  accumulate = _accumulator(do_BTHC.dtype)
  dq_spans, dkv_spans = [], []
  dsink_H = None if keys.sink_H is None else jnp.zeros_like(keys.sink_H, dtype=accumulate)
  spans = _spans(rule, queries, keys)
  for span, lse_nBGr1 in zip(spans, lse_spans, strict=True):
    seen = span.keys(keys)
    zeros = [jnp.zeros_like(x, dtype=accumulate) for x in (seen.k_BGSC, seen.v_BGSC)]
    blocks = _cut(span.queries((queries, o_BTHC, do_BTHC)), rule.block)
    attend = functools.partial(_backward_block, rule, seen)
    (dkv, dsink_H), dq_nBtHC = _scan(attend, (zeros, dsink_H), (*blocks, lse_nBGr1))
    missing = keys.k_BGSC.shape[2] - span.num_keys
    dkv_spans.append([jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) for x in dkv])
    dq_spans.append(_join(dq_nBtHC, span))
  dk_BGSC, dv_BGSC = (sum(parts).astype(do_BTHC.dtype) for parts in zip(*dkv_spans, strict=True))
  dsink_H = None if dsink_H is None else dsink_H.astype(keys.sink_H.dtype)
  dqueries = _Queries(jnp.concatenate(dq_spans, axis=1), None, None)
  return dqueries, _Keys(dk_BGSC, dv_BGSC, None, None, dsink_H)


_attend.defvjp(_forward, _backward)


def _forward_block(rule, keys, _, queries):
  """o_BtHC and the log-sum-exp of each row's scores, as `scan` wants them."""
  score_BGrS, _ = _scores(rule, queries, keys)
  max_BGr1 = score_BGrS.max(-1, keepdims=True)
  if keys.sink_H is not None:
    max_BGr1 = jnp.maximum(max_BGr1, _sinks(queries, keys))
  p_BGrS = jnp.exp(score_BGrS - max_BGr1)
  sum_BGr1 = p_BGrS.sum(-1, keepdims=True)
  if keys.sink_H is not None:
    sum_BGr1 += jnp.exp(_sinks(queries, keys) - max_BGr1)
  # Divided after the sum over keys: C numbers a row rather than S.
  o_BGrC = _dot(p_BGrS.astype(keys.v_BGSC.dtype), keys.v_BGSC, 0) / sum_BGr1
  o_BtHC = _unfold(o_BGrC.astype(queries.q_BTHC.dtype), queries.row_BT.shape[1])
  return (), (o_BtHC, max_BGr1 + jnp.log(sum_BGr1))


def _backward_block(rule, keys, sums, block):
  """The gradients of k, v and sinks with this block's part added, and dq_BtHC."""
  dkv, dsink_H = sums
  queries, o_BtHC, do_BtHC, lse_BGr1 = block
  dtype = o_BtHC.dtype
  q_BGrC, o_BGrC, do_BGrC = (_fold(x, keys) for x in (queries.q_BTHC, o_BtHC, do_BtHC))
  accumulate = _accumulator(dtype)
  mean_BGr1 = (do_BGrC.astype(accumulate) * o_BGrC.astype(accumulate)).sum(-1, keepdims=True)
  score_BGrS, slope_BGrS = _scores(rule, queries, keys)
  p_BGrS = jnp.exp(score_BGrS - lse_BGr1)
  dp_BGrS = _dot(do_BGrC, keys.v_BGSC, 1)
  dscore_BGrS = (p_BGrS * (dp_BGrS - mean_BGr1) * slope_BGrS).astype(dtype)
  dq_BGrC = _dot(dscore_BGrS, keys.k_BGSC, 0).astype(dtype)
  dk_BGCS = _dot(q_BGrC.swapaxes(2, 3), dscore_BGrS, 0)
  dv_BGCS = _dot(do_BGrC.swapaxes(2, 3), p_BGrS.astype(dtype), 0)
  dkv = [total + part.swapaxes(2, 3) for total, part in zip(dkv, (dk_BGCS, dv_BGCS), strict=True)]
  if dsink_H is not None:
    dsink_BGr1 = -jnp.exp(_sinks(queries, keys) - lse_BGr1) * mean_BGr1
    dsink_H += dsink_BGr1.reshape(*dsink_BGr1.shape[:2], -1, o_BtHC.shape[1]).sum((0, 3)).ravel()
  return (dkv, dsink_H), _unfold(dq_BGrC, o_BtHC.shape[1])


def _sinks(queries: _Queries, keys: _Keys) -> jax.Array:
  """score_1Gr1 of the sinks."""
  num_kv_heads, accumulate = keys.k_BGSC.shape[1], _accumulator(keys.k_BGSC.dtype)
  sink_Gh1 = keys.sink_H.astype(accumulate).reshape(num_kv_heads, -1, 1)
  return jnp.repeat(sink_Gh1, queries.row_BT.shape[1], axis=2).reshape(1, num_kv_heads, -1, 1)


def _scores(rule: _Rule, queries: _Queries, keys: _Keys) -> tuple[jax.Array, jax.Array | float]:
  """(score_BGrS, its derivative by the product of query and key).

  Scores are very low, but finite, where the query does not see the key.
  """
  score_BGrS = _dot(_fold(queries.q_BTHC, keys), keys.k_BGSC, 1)
  num_seqs, num_kv_heads, _, num_keys = score_BGrS.shape
  score_BGhtS = score_BGrS.reshape(num_seqs, num_kv_heads, -1, queries.row_BT.shape[1], num_keys)
  visible_BtS = visible(queries.row_BT, queries.segment_BT, keys.segment_BS, keys.window)
  score_BGhtS, slope = apply_soft_cap(score_BGhtS * rule.scale, rule.soft_cap), rule.scale
  if rule.soft_cap:
    slope *= (1 - jnp.square(score_BGhtS / rule.soft_cap)).reshape(score_BGrS.shape)
  lowest = jnp.finfo(score_BGrS.dtype).min
  score_BGhtS = jnp.where(visible_BtS[:, None, None], score_BGhtS, lowest)
  return score_BGhtS.reshape(score_BGrS.shape), slope


def _spans(rule: _Rule, queries: _Queries, keys: _Keys) -> list[_Span]:
  num_queries, num_keys = queries.row_BT.shape[1], keys.segment_BS.shape[1]
  if not rule.aligned:
    return [_Span(0, num_queries, num_keys)]
  num_blocks = -(-num_queries // rule.block)
  length = -(-num_blocks // _MAX_SPANS) * rule.block
  stops = [min(start + length, num_queries) for start in range(0, num_queries, length)]
  return [_Span(length * i, stop, stop) for i, stop in enumerate(stops)]


def _scan(body, carry, blocks):
  num_blocks = jax.tree.leaves(blocks)[0].shape[0]
  # An unroll beyond the length leaves no loop, which costs a copy of all it carries.
  return jax.lax.scan(body, carry, blocks, unroll=2 if num_blocks == 1 else 1)


def _cut(tree: Any, block: int) -> Any:
  """Each [B, T, ...] as blocks [n, B, t, ...], the last one filled up with zeros."""

  def cut(x_BT):
    missing = -x_BT.shape[1] % block
    x_BT = jnp.pad(x_BT, [(0, 0), (0, missing)] + [(0, 0)] * (x_BT.ndim - 2))
    return x_BT.reshape(x_BT.shape[0], -1, block, *x_BT.shape[2:]).swapaxes(0, 1)

  return jax.tree.map(cut, tree)


def _join(x_nBtHC: jax.Array, span: _Span) -> jax.Array:
  """The blocks as one [B, T, H, C] again, less what filled them up."""
  x_BntHC = x_nBtHC.swapaxes(0, 1)
  x_BTHC = x_BntHC.reshape(x_BntHC.shape[0], -1, *x_BntHC.shape[3:])
  return x_BTHC[:, : span.stop - span.start]


def _fold(x_BtHC: jax.Array, keys: _Keys) -> jax.Array:
  """x_BGrC, the heads that share a key/value head one below the other."""
  num_seqs, num_queries, _, num_channels = x_BtHC.shape
  num_kv_heads = keys.k_BGSC.shape[1]
  x_BtGhC = x_BtHC.reshape(num_seqs, num_queries, num_kv_heads, -1, num_channels)
  return x_BtGhC.transpose(0, 2, 3, 1, 4).reshape(num_seqs, num_kv_heads, -1, num_channels)


def _unfold(x_BGrC: jax.Array, num_queries: int) -> jax.Array:
  """x_BtHC, undoing `_fold`."""
  num_seqs, num_kv_heads, _, num_channels = x_BGrC.shape
  x_BGhtC = x_BGrC.reshape(num_seqs, num_kv_heads, -1, num_queries, num_channels)
  x_BtGhC = x_BGhtC.transpose(0, 3, 1, 2, 4)
  return x_BtGhC.reshape(num_seqs, num_queries, -1, num_channels)


def _dot(x_BGmn: jax.Array, y_BGno: jax.Array, contract: int) -> jax.Array:
  """Per B and G, x times y, of whose last two axes number `contract` is summed over."""
  dimensions = (((3,), (2 + contract,)), ((0, 1), (0, 1)))
  accumulate = _accumulator(x_BGmn.dtype)
  return jax.lax.dot_general(x_BGmn, y_BGno, dimensions, preferred_element_type=accumulate)


def _accumulator(dtype: np.dtype) -> np.dtype:
  return np.promote_types(dtype, np.float32)
