"""`jax.nn.dot_product_attention`: compiled by XLA, or cuDNN's kernel for NVIDIA GPUs.

XLA computes all scores at once. cuDNN computes blocks of them, but JAX's function has no documents
in packed rows: they are a mask of all scores, which cuDNN reads. In bfloat16 JAX's function mixes
types, which strict dtype promotion rejects.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.errors import UserError
from maxlite.kernels.attention.reference import RESIDUAL_NAME


def attention(
  q_BTHC, k_BSGC, v_BSGC, mask, *, scale, block_q, soft_cap, sink_H, implementation="xla"
) -> jax.Array:
  """o_BTHC in q's type.

  Raises:
    UserError: a soft cap or sinks, which JAX's function does not support; cuDNN with float32.
  """
  del block_q
  name = "dot_product" if implementation == "xla" else implementation
  if soft_cap or sink_H is not None:
    feature = "a soft cap" if soft_cap else "sinks"
    raise UserError(f"attention={name} does not support {feature}; write attention=chunked")
  if name == "cudnn" and q_BTHC.dtype.itemsize != 2:
    raise UserError(f"attention=cudnn does not support {q_BTHC.dtype}; write dtype=bfloat16")
  num_channels = v_BSGC.shape[-1]
  width = max(q_BTHC.shape[-1], num_channels)  # JAX requires the same number for q, k and v
  q_BTHC, k_BSGC, v_BSGC = (
    jnp.pad(x, [(0, 0)] * 3 + [(0, width - x.shape[-1])]) for x in (q_BTHC, k_BSGC, v_BSGC)
  )
  visible_B1TS = mask.visible_BTS[:, None]
  o_BTHC = jax.nn.dot_product_attention(
    *(q_BTHC, k_BSGC, v_BSGC), mask=visible_B1TS, scale=scale, implementation=implementation
  )
  return checkpoint_name(o_BTHC[..., :num_channels], RESIDUAL_NAME)


cudnn_attention = functools.partial(attention, implementation="cudnn")
