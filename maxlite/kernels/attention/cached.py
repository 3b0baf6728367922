"""Attention of a few new queries to a cache of keys and values.

The cache has shape [B, G, S, C], so that scores are one batched product per key/value head without
a transpose. It is split into blocks along S; a block without a visible key is not read.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), section 3.1, for
sums over blocks.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.kernels.numerics import accumulator_dtype, apply_soft_cap, dot


@struct.dataclass
class BlockMask:
  """Which keys of a block the queries attend."""

  visible_BTS: jax.Array
  is_reached: jax.Array | None = None  # whether any key is visible; None: always


@struct.dataclass
class _OnlineSoftmax:
  """Running maximum of the scores, and sums of exp(score - max) and of that times the values."""

  max_BGt1: jax.Array
  sum_BGt1: jax.Array
  o_BGtC: jax.Array


def attention(
  q_BTHC: jax.Array,
  k_blocks: Sequence[jax.Array],
  v_blocks: Sequence[jax.Array],
  masks: Sequence[BlockMask],
  *,
  scale: float,
  soft_cap: float = 0.0,
  sink_H: jax.Array | None = None,
) -> jax.Array:
  """o_BTHC in q's type, with the channels of v; scores and sums are at least float32.

  Args:
    k_blocks: [B, G, S, C] each, with any S; `v_blocks` and `masks` match.
    soft_cap, sink_H: see api.py.
  """
  num_rows, num_queries, num_heads, num_channels = q_BTHC.shape
  num_groups = k_blocks[0].shape[1]
  num_out = v_blocks[0].shape[-1]
  q_BTGhC = q_BTHC.reshape(num_rows, num_queries, num_groups, -1, num_channels)
  # The heads of a group are adjacent for each query.
  q_BGtC = q_BTGhC.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_groups, -1, num_channels)
  state = _init(q_BGtC, num_out, num_queries, sink_H)
  for k_BGSC, v_BGSC, mask in zip(k_blocks, v_blocks, masks, strict=True):
    add_block = functools.partial(
      _add_block,
      q_BGtC=q_BGtC,
      k_BGSC=k_BGSC,
      v_BGSC=v_BGSC,
      visible_BTS=mask.visible_BTS,
      scale=scale,
      soft_cap=soft_cap,
    )
    if mask.is_reached is None:
      state = add_block(state)
    else:
      state = jax.lax.cond(mask.is_reached, add_block, _unchanged, state)
  o_BGtC = state.o_BGtC / state.sum_BGt1
  o_BGThC = o_BGtC.reshape(num_rows, num_groups, num_queries, -1, num_out)
  o_BTHC = o_BGThC.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_queries, num_heads, num_out)
  return o_BTHC.astype(q_BTHC.dtype)


def _unchanged(state: _OnlineSoftmax) -> _OnlineSoftmax:
  return state


def _init(
  q_BGtC: jax.Array, num_out: int, num_queries: int, sink_H: jax.Array | None
) -> _OnlineSoftmax:
  """The state without any key; with sinks, it holds their scores, whose values are zero."""
  dtype = accumulator_dtype(q_BGtC.dtype)
  lead = q_BGtC.shape[:3]
  o_BGtC = jnp.zeros((*lead, num_out), dtype)
  if sink_H is None:
    return _OnlineSoftmax(
      max_BGt1=jnp.full((*lead, 1), jnp.finfo(dtype).min),
      sum_BGt1=jnp.zeros((*lead, 1), dtype),
      o_BGtC=o_BGtC,
    )
  num_groups = lead[1]
  sink_Gh = sink_H.astype(dtype).reshape(num_groups, -1)
  sink_1Gt1 = jnp.tile(sink_Gh, (1, num_queries))[None, ..., None]
  return _OnlineSoftmax(
    max_BGt1=jnp.broadcast_to(sink_1Gt1, (*lead, 1)),
    sum_BGt1=jnp.ones((*lead, 1), dtype),
    o_BGtC=o_BGtC,
  )


def _add_block(
  state: _OnlineSoftmax,
  *,
  q_BGtC: jax.Array,
  k_BGSC: jax.Array,
  v_BGSC: jax.Array,
  visible_BTS: jax.Array,
  scale: float,
  soft_cap: float,
) -> _OnlineSoftmax:
  """The state with the keys of a block added."""
  score_BGtS = apply_soft_cap(dot(q_BGtC, k_BGSC, (3, 3), 2) * scale, soft_cap)
  heads_per_group = q_BGtC.shape[2] // visible_BTS.shape[1]
  visible_B1tS = jnp.repeat(visible_BTS, heads_per_group, axis=1)[:, None]
  score_BGtS = jnp.where(visible_B1tS, score_BGtS, jnp.finfo(score_BGtS.dtype).min)
  max_BGt1 = jnp.maximum(state.max_BGt1, jnp.max(score_BGtS, axis=-1, keepdims=True))
  p_BGtS = jnp.exp(score_BGtS - max_BGt1)
  rescale_BGt1 = jnp.exp(state.max_BGt1 - max_BGt1)
  added_sum_BGt1 = jnp.sum(p_BGtS, axis=-1, keepdims=True)
  added_o_BGtC = dot(p_BGtS.astype(v_BGSC.dtype), v_BGSC, (3, 2), 2)
  return _OnlineSoftmax(
    max_BGt1=max_BGt1,
    sum_BGt1=state.sum_BGt1 * rescale_BGt1 + added_sum_BGt1,
    o_BGtC=state.o_BGtC * rescale_BGt1 + added_o_BGtC,
  )
