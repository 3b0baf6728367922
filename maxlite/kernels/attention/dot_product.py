"""`jax.nn.dot_product_attention`: compiled by XLA, or cuDNN's kernel for NVIDIA GPUs.

XLA computes all scores at once. cuDNN computes blocks of them, but JAX's function has no documents
in packed rows: they are a mask of all scores, which cuDNN reads. In bfloat16 JAX's function mixes
types, which strict dtype promotion rejects.

cuDNN's call does not declare over which mesh axes its result varies, so `jax.shard_map` around it
needs check_vma=False.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.errors import UserError
from maxlite.kernels.attention.reference import RESIDUAL_NAME, AttentionMask, ScoreOptions


def attention(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  score: ScoreOptions,
) -> jax.Array:
  """o_BTHC in q's type.

  Raises:
    UserError: a soft cap or sinks, which JAX's function does not support.
  """
  _check_features("dot_product", score)
  return _attend(q_BTHC, k_BSGC, v_BSGC, mask, score.scale, "xla")


def cudnn_attention(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  score: ScoreOptions,
) -> jax.Array:
  """o_BTHC in q's type, by cuDNN.

  Raises:
    UserError: a soft cap, sinks, or float32.
  """
  _check_features("cudnn", score)
  if q_BTHC.dtype.itemsize != 2:
    raise UserError(f"attention=cudnn does not support {q_BTHC.dtype}; write dtype=bfloat16")
  return _attend(q_BTHC, k_BSGC, v_BSGC, mask, score.scale, "cudnn")


def _check_features(name: str, score: ScoreOptions) -> None:
  """Refuse what JAX's function does not support."""
  if score.soft_cap:
    raise UserError(f"attention={name} does not support a soft cap; write attention=chunked")
  if score.sink_H is not None:
    raise UserError(f"attention={name} does not support sinks; write attention=chunked")


def _attend(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  mask: AttentionMask,
  scale: float,
  implementation: Literal["xla", "cudnn"],
) -> jax.Array:
  # JAX requires the same number of channels for queries, keys and values.
  num_channels = v_BSGC.shape[-1]
  width = max(q_BTHC.shape[-1], num_channels)
  o_BTHC = jax.nn.dot_product_attention(
    _pad_channels(q_BTHC, width),
    _pad_channels(k_BSGC, width),
    _pad_channels(v_BSGC, width),
    mask=mask.visible_BTS[:, None],
    scale=scale,
    implementation=implementation,
  )
  return checkpoint_name(o_BTHC[..., :num_channels], RESIDUAL_NAME)


def _pad_channels(x_BTHC: jax.Array, width: int) -> jax.Array:
  """x_BTHC with `width` channels, the additional ones zero."""
  missing = width - x_BTHC.shape[-1]
  return jnp.pad(x_BTHC, ((0, 0), (0, 0), (0, 0), (0, missing)))
