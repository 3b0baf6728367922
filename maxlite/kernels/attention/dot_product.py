"""`jax.nn.dot_product_attention` as XLA compiles it: all scores at once, no fused kernel.

In bfloat16 JAX's function mixes types, which strict dtype promotion refuses.
"""

import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.kernels.attention.reference import visible


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
  """o_BTHC in q's type.

  Raises:
    UserError: for a soft cap or sinks, which JAX's function does not know.
  """
  del block_q
  if soft_cap or sink_H is not None:
    what = "soft cap" if soft_cap else "sinks"
    raise UserError(f"attention=dot_product knows no {what}; write attention=chunked")
  q_row_BT = q_start + jnp.arange(q_BTHC.shape[1], dtype=jnp.int32)[None]
  mask_B1TS = visible(q_row_BT, q_segment_BT, kv_segment_BS, window)[:, None]
  num_channels = v_BSGC.shape[-1]
  width = max(q_BTHC.shape[-1], num_channels)  # JAX's function knows one number of channels
  q_BTHC, k_BSGC, v_BSGC = (
    jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (q_BTHC, k_BSGC, v_BSGC)
  )
  o_BTHC = jax.nn.dot_product_attention(
    q_BTHC, k_BSGC, v_BSGC, mask=mask_B1TS, scale=scale, implementation="xla"
  )
  return o_BTHC[..., :num_channels]
