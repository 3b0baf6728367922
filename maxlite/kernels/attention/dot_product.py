"""`jax.nn.dot_product_attention` compiled by XLA: all scores at once, without a fused kernel.

In bfloat16 JAX's function mixes types, which strict dtype promotion rejects.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.errors import UserError
from maxlite.kernels.attention.reference import RESIDUAL_NAME, AttentionMask


def attention(
  q_BTHC, k_BSGC, v_BSGC, mask: AttentionMask, *, scale, block_q, soft_cap, sink_H
) -> jax.Array:
  """o_BTHC in q's type.

  Raises:
    UserError: a soft cap or sinks, which JAX's function does not support.
  """
  del block_q
  if soft_cap or sink_H is not None:
    feature = "a soft cap" if soft_cap else "sinks"
    raise UserError(f"attention=dot_product does not support {feature}; write attention=chunked")
  num_channels = v_BSGC.shape[-1]
  width = max(q_BTHC.shape[-1], num_channels)  # JAX requires the same number for q, k and v
  q_BTHC, k_BSGC, v_BSGC = (
    jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (q_BTHC, k_BSGC, v_BSGC)
  )
  o_BTHC = jax.nn.dot_product_attention(
    *(q_BTHC, k_BSGC, v_BSGC), mask=mask.visible_BTS[:, None], scale=scale, implementation="xla"
  )
  return checkpoint_name(o_BTHC[..., :num_channels], RESIDUAL_NAME)
