"""Attention of a few new queries to a cache of keys and values.

The cache is laid out [B, G, S, C], so that scores are one batched product per key/value head with
the cache as it lies in memory. It comes in blocks along S; one without a key that any query attends
is not read.

Source: Milakov and Gimelshein, Online normalizer calculation for softmax (2018), section 3.1, for
sums over blocks.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.kernels.soft_cap import apply_soft_cap


@struct.dataclass
class BlockMask:
  """What queries attend of a block."""

  visible_BTS: jax.Array
  is_reached: jax.Array | None = None  # False: nothing; None: something


@struct.dataclass
class _Sums:
  """Over keys: the largest score, and the sums of exp(score - largest) and of that times values."""

  largest_BGt1: jax.Array
  weight_BGt1: jax.Array
  o_BGtC: jax.Array


def attention(
  q_BTHC: jax.Array,
  k_blocks: Sequence[jax.Array],
  v_blocks: Sequence[jax.Array],
  seen: Sequence[BlockMask],
  *,
  scale: float,
  soft_cap: float = 0.0,
  sink_H: jax.Array | None = None,
) -> jax.Array:
  """o_BTHC in q's type, with the channels of v; scores and sums are in float32 at least.

  `soft_cap` and `sink_H` are as in api.py.

  Args:
    k_blocks: [B, G, S, C] each, of any S; as `v_blocks` and `seen`.
  """
  num_rows, num_queries, _, num_channels = q_BTHC.shape
  num_groups, num_out = k_blocks[0].shape[1], v_blocks[0].shape[-1]
  q_BTGhC = q_BTHC.reshape(num_rows, num_queries, num_groups, -1, num_channels)
  # Heads of a group lie side by side for each query.
  q_BGtC = q_BTGhC.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_groups, -1, num_channels)
  add = functools.partial(_add, scale=scale, soft_cap=soft_cap)
  sums = _no_keys(q_BGtC, num_out, num_queries, sink_H)
  for k_BGSC, v_BGSC, of_block in zip(k_blocks, v_blocks, seen, strict=True):
    args = (sums, q_BGtC, k_BGSC, v_BGSC, of_block.visible_BTS)
    if of_block.is_reached is None:
      sums = add(*args)
    else:
      sums = jax.lax.cond(of_block.is_reached, add, lambda sums, *_: sums, *args)
  o_BGtC = sums.o_BGtC / sums.weight_BGt1
  o_BGThC = o_BGtC.reshape(num_rows, num_groups, num_queries, -1, num_out)
  return o_BGThC.transpose(0, 2, 1, 3, 4).reshape(*q_BTHC.shape[:3], -1).astype(q_BTHC.dtype)


def _no_keys(q_BGtC: jax.Array, num_out: int, num_queries: int, sink_H: jax.Array | None) -> _Sums:
  """Sums over no key, or over the sinks, whose value is zero."""
  dtype, lead = np.promote_types(q_BGtC.dtype, np.float32), q_BGtC.shape[:3]
  o_BGtC = jnp.zeros((*lead, num_out), dtype)
  if sink_H is None:
    return _Sums(jnp.full((*lead, 1), jnp.finfo(dtype).min), jnp.zeros((*lead, 1), dtype), o_BGtC)
  sink_Gh = sink_H.astype(dtype).reshape(lead[1], -1)
  sink_1Gt1 = jnp.tile(sink_Gh, (1, num_queries))[None, ..., None]
  return _Sums(jnp.broadcast_to(sink_1Gt1, (*lead, 1)), jnp.ones((*lead, 1), dtype), o_BGtC)


def _add(
  sums: _Sums,
  q_BGtC: jax.Array,
  k_BGSC: jax.Array,
  v_BGSC: jax.Array,
  visible_BTS: jax.Array,
  *,
  scale: float,
  soft_cap: float,
) -> _Sums:
  """`sums` with those over a block."""
  score_BGtS = apply_soft_cap(_dot(q_BGtC, k_BGSC, 3) * scale, soft_cap)
  visible_B1tS = jnp.repeat(visible_BTS, q_BGtC.shape[2] // visible_BTS.shape[1], axis=1)[:, None]
  score_BGtS = jnp.where(visible_B1tS, score_BGtS, jnp.finfo(score_BGtS.dtype).min)
  largest_BGt1 = jnp.maximum(sums.largest_BGt1, jnp.max(score_BGtS, axis=-1, keepdims=True))
  p_BGtS = jnp.exp(score_BGtS - largest_BGt1)
  before_BGt1 = jnp.exp(sums.largest_BGt1 - largest_BGt1)
  return _Sums(
    largest_BGt1,
    sums.weight_BGt1 * before_BGt1 + jnp.sum(p_BGtS, axis=-1, keepdims=True),
    sums.o_BGtC * before_BGt1 + _dot(p_BGtS.astype(v_BGSC.dtype), v_BGSC, 2),
  )


def _dot(x_BGtN: jax.Array, y: jax.Array, contract: int) -> jax.Array:
  """Per B and G, x times y, of which axis `contract` is summed over."""
  dimensions = (((3,), (contract,)), ((0, 1), (0, 1)))
  accumulate = np.promote_types(x_BGtN.dtype, np.float32)
  return jax.lax.dot_general(x_BGtN, y, dimensions, preferred_element_type=accumulate)
