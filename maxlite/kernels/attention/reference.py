"""Reference implementation: all scores at once, and the definition of which keys are visible."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.numerics import accumulator_dtype, apply_soft_cap

RESIDUAL_NAME = "attention_out"  # for rematerialization policies; see api.py


class PartialAttention(NamedTuple):
  """Attention to a part of the keys of a row, as functions that JAX does not differentiate.

  forward(q_BTHC, k_BSGC, v_BSGC, mask, scale=, block_q=, soft_cap=) -> (o_BTHC, lse_BHT), where lse
  is the logarithm of the sum of the exponentiated scores. gradients(q, k, v, mask, o, lse, do,
  scale=, ...) -> (dq, dk, dv), where o and lse are of all keys and the result is of these.
  """

  forward: Callable[..., tuple[jax.Array, jax.Array]]
  gradients: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


class AttentionMask(NamedTuple):
  """What decides which keys a query attends; see api.py."""

  q_segment_BT: jax.Array
  kv_segment_BS: jax.Array
  q_start: int | jax.Array
  window: int | None

  @property
  def q_row_BT(self) -> jax.Array:
    """Row of each query among the keys."""
    row_T = self.q_start + jnp.arange(self.q_segment_BT.shape[1], dtype=jnp.int32)
    return jnp.broadcast_to(row_T[None], self.q_segment_BT.shape)

  @property
  def visible_BTS(self) -> jax.Array:
    return visible(self.q_row_BT, self.q_segment_BT, self.kv_segment_BS, self.window)


def visible(q_row_BT, q_segment_BT, kv_segment_BS, window=None) -> jax.Array:
  """[B, T, S] which keys each query attends; the queries are rows `q_row_BT` of the keys."""
  kv_row_11S = jnp.arange(kv_segment_BS.shape[1], dtype=jnp.int32)[None, None, :]
  same_segment_BTS = q_segment_BT[:, :, None] == kv_segment_BS[:, None, :]
  distance_BTS = q_row_BT[:, :, None] - kv_row_11S
  visible_BTS = same_segment_BTS & (distance_BTS >= 0)
  return visible_BTS if window is None else visible_BTS & (distance_BTS < window)


def attention(
  q_BTHC, k_BSGC, v_BSGC, mask: AttentionMask, *, scale, block_q, soft_cap, sink_H
) -> jax.Array:
  """o_BTHC in q's type."""
  del block_q
  dtype, num_heads = accumulator_dtype(q_BTHC.dtype), q_BTHC.shape[2]
  k_BSHC, v_BSHC = (
    jnp.repeat(x.astype(dtype), num_heads // k_BSGC.shape[2], axis=2) for x in (k_BSGC, v_BSGC)
  )
  score_BHTS = jnp.einsum("BTHC,BSHC->BHTS", q_BTHC.astype(dtype), k_BSHC) * scale
  score_BHTS = apply_soft_cap(score_BHTS, soft_cap)
  score_BHTS = jnp.where(mask.visible_BTS[:, None], score_BHTS, jnp.finfo(dtype).min)
  if sink_H is None:
    p_BHTS = jax.nn.softmax(score_BHTS)
  else:
    sink_1H11 = sink_H.astype(dtype)[None, :, None, None]
    sink_BHT1 = jnp.broadcast_to(sink_1H11, (*score_BHTS.shape[:3], 1))
    p_BHTS = jax.nn.softmax(jnp.concatenate([score_BHTS, sink_BHT1], axis=-1))[..., :-1]
  o_BTHC = jnp.einsum("BHTS,BSHC->BTHC", p_BHTS, v_BSHC).astype(q_BTHC.dtype)
  return checkpoint_name(o_BTHC, RESIDUAL_NAME)
