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

  - forward(q_BTHC, k_BSGC, v_BSGC, mask, score) -> (o_BTHC, lse_BHT), where lse is the logarithm of
    the sum of the exponentiated scores.
  - gradients(q, k, v, mask, score, o, lse, do) -> (dq, dk, dv), where o and lse are results over
    all keys of the row, and the gradients are those that come from the given keys.

  `score` has no sinks.
  """

  forward: Callable[..., tuple[jax.Array, jax.Array]]
  gradients: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


class ScoreOptions(NamedTuple):
  """How scores are computed; see api.py."""

  scale: float
  block_q: int
  soft_cap: float = 0.0
  sink_H: jax.Array | None = None


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


def visible(
  q_row_BT: jax.Array,
  q_segment_BT: jax.Array,
  kv_segment_BS: jax.Array,
  window: int | jax.Array | None = None,
) -> jax.Array:
  """[B, T, S] which keys each query attends; the queries are rows `q_row_BT` of the keys."""
  kv_row_11S = jnp.arange(kv_segment_BS.shape[1], dtype=jnp.int32)[None, None, :]
  same_segment_BTS = q_segment_BT[:, :, None] == kv_segment_BS[:, None, :]
  distance_BTS = q_row_BT[:, :, None] - kv_row_11S
  visible_BTS = same_segment_BTS & (distance_BTS >= 0)
  if window is not None:
    visible_BTS &= distance_BTS < window
  return visible_BTS


def attention(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  score: ScoreOptions,
) -> jax.Array:
  """o_BTHC in q's type."""
  dtype = accumulator_dtype(q_BTHC.dtype)
  heads_per_group = q_BTHC.shape[2] // k_BSGC.shape[2]
  k_BSHC = jnp.repeat(k_BSGC.astype(dtype), heads_per_group, axis=2)
  v_BSHC = jnp.repeat(v_BSGC.astype(dtype), heads_per_group, axis=2)
  score_BHTS = jnp.einsum("BTHC,BSHC->BHTS", q_BTHC.astype(dtype), k_BSHC) * score.scale
  score_BHTS = apply_soft_cap(score_BHTS, score.soft_cap)
  lowest = jnp.finfo(dtype).min
  score_BHTS = jnp.where(mask.visible_BTS[:, None], score_BHTS, lowest)
  p_BHTS = _softmax(score_BHTS, score.sink_H)
  o_BTHC = jnp.einsum("BHTS,BSHC->BTHC", p_BHTS, v_BSHC).astype(q_BTHC.dtype)
  return checkpoint_name(o_BTHC, RESIDUAL_NAME)


def _softmax(score_BHTS: jax.Array, sink_H: jax.Array | None) -> jax.Array:
  """The probabilities of the keys; with sinks, their sum is less than 1."""
  if sink_H is None:
    return jax.nn.softmax(score_BHTS)
  sink_1H11 = sink_H.astype(score_BHTS.dtype)[None, :, None, None]
  sink_BHT1 = jnp.broadcast_to(sink_1H11, (*score_BHTS.shape[:3], 1))
  p_BHTS1 = jax.nn.softmax(jnp.concatenate([score_BHTS, sink_BHT1], axis=-1))
  return p_BHTS1[..., :-1]
