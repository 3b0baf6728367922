"""Rotary position embedding."""

import jax
import jax.numpy as jnp
import numpy as np


def rope_tables(
  position_BT: jax.Array, num_channels: int, max_timescale: float
) -> tuple[jax.Array, jax.Array]:
  """(cos_BTC, sin_BTC), float32, C = num_channels / 2: the rotation of each channel pair."""
  exponent_C = jnp.arange(num_channels // 2, dtype=jnp.float32) / (num_channels // 2)
  angle_BTC = position_BT.astype(jnp.float32)[..., None] / (max_timescale**exponent_C)[None, None]
  return jnp.cos(angle_BTC), jnp.sin(angle_BTC)


def apply_rope(x_BTHC: jax.Array, cos_BTC: jax.Array, sin_BTC: jax.Array) -> jax.Array:
  """x_BTHC with channel pairs (c, c + C/2) of every head rotated, in x's type.

  Source: Su et al., RoFormer (2021), section 3.2; pairs are halves of the head, as in Llama.
  """
  cos = cos_BTC[:, :, None].astype(np.promote_types(x_BTHC.dtype, jnp.float32))
  sin = sin_BTC[:, :, None].astype(cos.dtype)
  left, right = jnp.split(x_BTHC.astype(cos.dtype), 2, axis=-1)
  rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
  return rotated.astype(x_BTHC.dtype)
