"""Attention of a few new queries to a cache of keys and values.

The cache is laid out [B, G, S, C], so that scores are one batched product per key/value head with
the cache as it lies in memory.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.kernels.soft_cap import capped


def attention(
  q_BTHC: jax.Array,
  k_BGSC: jax.Array,
  v_BGSC: jax.Array,
  visible_BTS: jax.Array,
  *,
  scale: float,
  soft_cap: float = 0.0,
  sink_H: jax.Array | None = None,
) -> jax.Array:
  """o_BTHC in q's type, with the channels of v; scores and sums are in float32 at least.

  `soft_cap` and `sink_H` are as in api.py.
  """
  num_rows, num_queries, num_heads, num_channels = q_BTHC.shape
  num_groups = k_BGSC.shape[1]
  q_BTGhC = q_BTHC.reshape(num_rows, num_queries, num_groups, -1, num_channels)
  q_BGtC = q_BTGhC.transpose(0, 2, 1, 3, 4).reshape(num_rows, num_groups, -1, num_channels)
  score_BGtS = capped(_dot(q_BGtC, k_BGSC, 3) * scale, soft_cap)
  # Heads of a group lie side by side for each query.
  visible_B1tS = jnp.repeat(visible_BTS, num_heads // num_groups, axis=1)[:, None]
  score_BGtS = jnp.where(visible_B1tS, score_BGtS, jnp.finfo(score_BGtS.dtype).min)
  if sink_H is not None:
    sink_Gh = sink_H.astype(score_BGtS.dtype).reshape(num_groups, -1)
    sink_1Gt1 = jnp.tile(sink_Gh, (1, num_queries))[None, ..., None]
    sink_BGt1 = jnp.broadcast_to(sink_1Gt1, (*score_BGtS.shape[:3], 1))
    score_BGtS = jnp.concatenate([score_BGtS, sink_BGt1], axis=-1)
  p_BGtS = jax.nn.softmax(score_BGtS)[..., : v_BGSC.shape[2]]
  o_BGtC = _dot(p_BGtS.astype(v_BGSC.dtype), v_BGSC, 2)
  o_BGThC = o_BGtC.reshape(num_rows, num_groups, num_queries, -1, v_BGSC.shape[-1])
  return o_BGThC.transpose(0, 2, 1, 3, 4).reshape(*q_BTHC.shape[:3], -1).astype(q_BTHC.dtype)


def _dot(x_BGtN: jax.Array, y: jax.Array, contract: int) -> jax.Array:
  """Per B and G, x times y, of which axis `contract` is summed over."""
  dimensions = (((3,), (contract,)), ((0, 1), (0, 1)))
  accumulate = np.promote_types(x_BGtN.dtype, np.float32)
  return jax.lax.dot_general(x_BGtN, y, dimensions, preferred_element_type=accumulate)
