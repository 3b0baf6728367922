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

_MAX_SPANS = 8  # compile time grows with it; 8 spans compute 56 % of all scores, 16 would 53 %


class _Queries(NamedTuple):
  q_BTHC: jax.Array
  segment_BT: jax.Array
  row_BT: jax.Array


class _Keys(NamedTuple):
  k_BGSC: jax.Array
  v_BGSC: jax.Array
  segment_BS: jax.Array


class _Span(NamedTuple):
  start: int
  stop: int
  num_keys: int  # the keys that its queries are shown: the first so many

  def queries(self, tree: Any) -> Any:
    return jax.tree.map(lambda x_BT: x_BT[:, self.start : self.stop], tree)

  def keys(self, keys: _Keys) -> _Keys:
    seen = slice(0, self.num_keys)
    return _Keys(keys.k_BGSC[:, :, seen], keys.v_BGSC[:, :, seen], keys.segment_BS[:, seen])


def attention(
  q_BTHC, k_BSGC, v_BSGC, *, q_segment_BT, kv_segment_BS, q_start, scale, block_q
) -> jax.Array:
  """o_BTHC in q's type."""
  num_queries, num_keys = q_BTHC.shape[1], k_BSGC.shape[1]
  aligned = isinstance(q_start, int) and q_start == 0 and num_queries == num_keys
  row_T = q_start + jnp.arange(num_queries, dtype=jnp.int32)
  queries = _Queries(q_BTHC, q_segment_BT, jnp.broadcast_to(row_T[None], q_segment_BT.shape))
  keys = _Keys(k_BSGC.swapaxes(1, 2), v_BSGC.swapaxes(1, 2), kv_segment_BS)
  return _attend(scale, min(block_q, num_queries), aligned, queries, keys)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(scale: float, block: int, aligned: bool, queries: _Queries, keys: _Keys) -> jax.Array:
  return _forward(scale, block, aligned, queries, keys)[0]


def _forward(scale, block, aligned, queries, keys):
  """o_BTHC, and what the backward pass needs."""
  o_spans, lse_spans = [], []
  for span in _spans(queries, keys, block, aligned):
    attend = functools.partial(_forward_block, scale, span.keys(keys))
    _, (o_nBtHC, lse_nBGr1) = _scan(attend, (), _cut(span.queries(queries), block))
    o_spans.append(_join(o_nBtHC, span))
    lse_spans.append(lse_nBGr1)
  o_BTHC = jnp.concatenate(o_spans, axis=1)
  return o_BTHC, (queries, keys, o_BTHC, lse_spans)


def _backward(scale, block, aligned, saved, do_BTHC):
  queries, keys, o_BTHC, lse_spans = saved
  accumulate = _accumulator(do_BTHC.dtype)
  dq_spans, dkv_spans = [], []
  spans = _spans(queries, keys, block, aligned)
  for span, lse_nBGr1 in zip(spans, lse_spans, strict=True):
    seen = span.keys(keys)
    zeros = [jnp.zeros_like(x, dtype=accumulate) for x in (seen.k_BGSC, seen.v_BGSC)]
    blocks = _cut(span.queries((queries, o_BTHC, do_BTHC)), block)
    attend = functools.partial(_backward_block, scale, seen)
    dkv, dq_nBtHC = _scan(attend, zeros, (*blocks, lse_nBGr1))
    missing = keys.k_BGSC.shape[2] - span.num_keys
    dkv_spans.append([jnp.pad(x, ((0, 0), (0, 0), (0, missing), (0, 0))) for x in dkv])
    dq_spans.append(_join(dq_nBtHC, span))
  dk_BGSC, dv_BGSC = (sum(parts).astype(do_BTHC.dtype) for parts in zip(*dkv_spans, strict=True))
  return _Queries(jnp.concatenate(dq_spans, axis=1), None, None), _Keys(dk_BGSC, dv_BGSC, None)


_attend.defvjp(_forward, _backward)


def _forward_block(scale, keys, _, queries):
  """o_BtHC and the log-sum-exp of each row's scores, as `scan` wants them."""
  score_BGrS = _scores(scale, queries, keys)
  max_BGr1 = score_BGrS.max(-1, keepdims=True)
  p_BGrS = jnp.exp(score_BGrS - max_BGr1)
  sum_BGr1 = p_BGrS.sum(-1, keepdims=True)
  # Divided after the sum over keys: C numbers a row rather than S.
  o_BGrC = _dot(p_BGrS.astype(keys.v_BGSC.dtype), keys.v_BGSC, 0) / sum_BGr1
  o_BtHC = _unfold(o_BGrC.astype(queries.q_BTHC.dtype), queries.row_BT.shape[1])
  return (), (o_BtHC, max_BGr1 + jnp.log(sum_BGr1))


def _backward_block(scale, keys, dkv, block):
  """The gradients of k and v with this block's part added, and dq_BtHC."""
  queries, o_BtHC, do_BtHC, lse_BGr1 = block
  dtype = o_BtHC.dtype
  q_BGrC, o_BGrC, do_BGrC = (_fold(x, keys) for x in (queries.q_BTHC, o_BtHC, do_BtHC))
  accumulate = _accumulator(dtype)
  mean_BGr1 = (do_BGrC.astype(accumulate) * o_BGrC.astype(accumulate)).sum(-1, keepdims=True)
  p_BGrS = jnp.exp(_scores(scale, queries, keys) - lse_BGr1)
  dscore_BGrS = (p_BGrS * (_dot(do_BGrC, keys.v_BGSC, 1) - mean_BGr1) * scale).astype(dtype)
  dq_BGrC = _dot(dscore_BGrS, keys.k_BGSC, 0).astype(dtype)
  dk_BGCS = _dot(q_BGrC.swapaxes(2, 3), dscore_BGrS, 0)
  dv_BGCS = _dot(do_BGrC.swapaxes(2, 3), p_BGrS.astype(dtype), 0)
  dkv = [total + part.swapaxes(2, 3) for total, part in zip(dkv, (dk_BGCS, dv_BGCS), strict=True)]
  return dkv, _unfold(dq_BGrC, o_BtHC.shape[1])


def _scores(scale: float, queries: _Queries, keys: _Keys) -> jax.Array:
  """score_BGrS; very low, but finite, where the query does not see the key."""
  score_BGrS = _dot(_fold(queries.q_BTHC, keys), keys.k_BGSC, 1)
  num_seqs, num_kv_heads, _, num_keys = score_BGrS.shape
  score_BGhtS = score_BGrS.reshape(num_seqs, num_kv_heads, -1, queries.row_BT.shape[1], num_keys)
  visible_B11tS = visible(queries.row_BT, queries.segment_BT, keys.segment_BS)[:, None, None]
  lowest = jnp.finfo(score_BGrS.dtype).min
  return jnp.where(visible_B11tS, score_BGhtS * scale, lowest).reshape(score_BGrS.shape)


def _spans(queries: _Queries, keys: _Keys, block: int, aligned: bool) -> list[_Span]:
  num_queries, num_keys = queries.row_BT.shape[1], keys.segment_BS.shape[1]
  if not aligned:
    return [_Span(0, num_queries, num_keys)]
  num_blocks = -(-num_queries // block)
  length = -(-num_blocks // _MAX_SPANS) * block
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
