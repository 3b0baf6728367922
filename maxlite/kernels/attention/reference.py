"""The oracle: every score at once, and the definition of what a query may see."""

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.kernels.soft_cap import apply_soft_cap


def visible(q_row_BT, q_segment_BT, kv_segment_BS, window=None) -> jax.Array:
  """[B, T, S] which keys each query attends, the queries being rows `q_row_BT` of the keys."""
  kv_row_11S = jnp.arange(kv_segment_BS.shape[1], dtype=jnp.int32)[None, None, :]
  same_segment_BTS = q_segment_BT[:, :, None] == kv_segment_BS[:, None, :]
  distance_BTS = q_row_BT[:, :, None] - kv_row_11S
  visible_BTS = same_segment_BTS & (distance_BTS >= 0)
  return visible_BTS if window is None else visible_BTS & (distance_BTS < window)


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
  del block_q
  num_queries, num_heads = q_BTHC.shape[1:3]
  accumulate = np.promote_types(q_BTHC.dtype, np.float32)
  k_BSHC, v_BSHC = (
    jnp.repeat(x.astype(accumulate), num_heads // k_BSGC.shape[2], axis=2) for x in (k_BSGC, v_BSGC)
  )
  score_BHTS = jnp.einsum("BTHC,BSHC->BHTS", q_BTHC.astype(accumulate), k_BSHC) * scale
  q_row_BT = q_start + jnp.arange(num_queries, dtype=jnp.int32)[None]
  visible_B1TS = visible(q_row_BT, q_segment_BT, kv_segment_BS, window)[:, None]
  score_BHTS = jnp.where(
    visible_B1TS, apply_soft_cap(score_BHTS, soft_cap), jnp.finfo(accumulate).min
  )
  if sink_H is None:
    p_BHTS = jax.nn.softmax(score_BHTS)
  else:
    sink_1H11 = sink_H.astype(accumulate)[None, :, None, None]
    sink_BHT1 = jnp.broadcast_to(sink_1H11, (*score_BHTS.shape[:3], 1))
    p_BHTS = jax.nn.softmax(jnp.concatenate([score_BHTS, sink_BHT1], axis=-1))[..., :-1]
  o_BTHC = jnp.einsum("BHTS,BSHC->BTHC", p_BHTS, v_BSHC)
  return o_BTHC.astype(q_BTHC.dtype)
