"""Rotary position embedding, with optional context extension."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import RopeConfig
from maxlite.kernels.numerics import accumulator_dtype

# In rotations over the original context: frequencies below the first are interpolated, those above
# the second are kept by Llama 3.1 (YaRN: cfg.beta_fast).
SLOW, LLAMA_FAST = 1.0, 4.0


def rope_tables(
  position_BT: jax.Array, num_channels: int, cfg: RopeConfig
) -> tuple[jax.Array, jax.Array]:
  """(cos_BTC, sin_BTC), float32, C = num_channels / 2: the rotation of each channel pair.

  YaRN lowers the temperature of attention. With mscale = 0, as published: both tables are scaled
  by 0.1 ln(factor) + 1, which affects the rotated channels only. Otherwise `score_factor` applies
  the temperature.

  Source: Peng et al., YaRN (2023), sections 2.2 (linear) and 3.4.
  """
  frequency_C = jnp.asarray(_frequencies(num_channels, cfg), jnp.float32)
  angle_BTC = position_BT.astype(jnp.float32)[..., None] * frequency_C[None, None]
  size = _growth(cfg, 1.0) if cfg.rope_type == "yarn" and not cfg.mscale else 1.0
  return jnp.cos(angle_BTC) * size, jnp.sin(angle_BTC) * size


def score_factor(cfg: RopeConfig) -> float:
  """The factor of attention scores in addition to 1 / sqrt(channels).

  With mscale > 0, YaRN lowers the temperature of all channels, rotated or not.

  Source: DeepSeek-V2 (2024), section 3.1.4 and the published configuration's mscale_all_dim.
  """
  return _growth(cfg, cfg.mscale) ** 2 if cfg.rope_type == "yarn" and cfg.mscale else 1.0


def apply_rope(x_BTHC: jax.Array, cos_BTC: jax.Array, sin_BTC: jax.Array) -> jax.Array:
  """x_BTHC with channel pairs (c, c + C/2) of every head rotated, in x's type.

  Tables with fewer pairs than the head has rotate its first channels and leave the others.

  Source: Su et al., RoFormer (2021), section 3.2; pairs are halves of the head, as in Llama.
  """
  num_rotated = 2 * cos_BTC.shape[-1]
  if num_rotated < x_BTHC.shape[-1]:
    rotated = apply_rope(x_BTHC[..., :num_rotated], cos_BTC, sin_BTC)
    return jnp.concatenate([rotated, x_BTHC[..., num_rotated:]], axis=-1)
  cos = cos_BTC[:, :, None].astype(accumulator_dtype(x_BTHC.dtype))
  sin = sin_BTC[:, :, None].astype(cos.dtype)
  left, right = jnp.split(x_BTHC.astype(cos.dtype), 2, axis=-1)
  rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
  return rotated.astype(x_BTHC.dtype)


def deinterleave(x_BTHC: jax.Array) -> jax.Array:
  """Moves channel 2c to c and 2c + 1 to C/2 + c: interleaved pairs to the layout of `apply_rope`.

  The order of channels does not affect the scores, so there is no inverse.
  """
  pairs = x_BTHC.reshape(*x_BTHC.shape[:-1], -1, 2)
  return pairs.swapaxes(-1, -2).reshape(x_BTHC.shape)


def _growth(cfg: RopeConfig, mscale: float) -> float:
  return 0.1 * mscale * math.log(cfg.rope_factor) + 1


def _frequencies(num_channels: int, cfg: RopeConfig) -> np.ndarray:
  """frequency_C [radians per position] of each channel pair, float64.

  High frequencies are kept, low ones are divided by the factor, with a ramp in between.
  """
  pair_C = np.arange(num_channels // 2, dtype=np.float64)
  frequency_C = cfg.rope_max_timescale ** (-2 * pair_C / num_channels)
  degree_C = np.clip(INTERPOLATIONS[cfg.rope_type](frequency_C, cfg), 0, 1)
  return frequency_C * (1 - degree_C + degree_C / cfg.rope_factor)


def _yarn(frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  """A ramp over channel pairs, between those with beta_fast and SLOW rotations."""
  num_channels = 2 * len(frequency_C)
  first, last = (
    num_channels
    * math.log(cfg.original_max_position_embeddings / (2 * math.pi * rotations))
    / (2 * math.log(cfg.rope_max_timescale))
    for rotations in (cfg.beta_fast, SLOW)
  )
  if cfg.rope_truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, num_channels - 1)
  # If the context has fewer positions than a rotation, the ramp falls, as in the published code.
  width = last - first if last != first else 1e-3
  return (np.arange(len(frequency_C)) - first) / width


def _llama(frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  """A ramp over rotations. Source: the code published with Grattafiori et al., Llama 3 (2024)."""
  rotations_C = cfg.original_max_position_embeddings * frequency_C / (2 * math.pi)
  return (LLAMA_FAST - rotations_C) / (LLAMA_FAST - SLOW)


# By rope_type: each pair's degree of interpolation, from 0 (kept) to 1 (divided by the factor).
INTERPOLATIONS = {
  "default": lambda frequency_C, cfg: np.zeros_like(frequency_C),
  "linear": lambda frequency_C, cfg: np.ones_like(frequency_C),
  "llama3.1": _llama,
  "yarn": _yarn,
}
