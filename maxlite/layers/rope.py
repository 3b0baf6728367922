"""Rotary position embedding, as it is or stretched to longer contexts."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import RopeConfig

# Turns within the original context below which a frequency is interpolated.
SLOW = 1.0
LLAMA_FAST = 4.0  # and above which Llama 3.1 keeps it; of YaRN that is cfg.beta_fast


def rope_tables(
  position_BT: jax.Array, num_channels: int, cfg: RopeConfig
) -> tuple[jax.Array, jax.Array]:
  """(cos_BTC, sin_BTC), float32, C = num_channels / 2: the rotation of each channel pair.

  YaRN lowers attention's temperature. With mscale = 0 it does so as published: both tables are
  0.1 ln(factor) + 1 times as large, which reaches the rotated channels only. Otherwise the tables
  only rotate, and `score_factor` holds the temperature.

  Source: Peng et al., YaRN (2023), sections 2.2 (linear) and 3.4.
  """
  frequency_C = jnp.asarray(_frequencies(num_channels, cfg), jnp.float32)
  angle_BTC = position_BT.astype(jnp.float32)[..., None] * frequency_C[None, None]
  size = _growth(cfg, 1.0) if cfg.rope_type == "yarn" and not cfg.mscale else 1.0
  return jnp.cos(angle_BTC) * size, jnp.sin(angle_BTC) * size


def score_factor(cfg: RopeConfig) -> float:
  """What attention's scores are multiplied with, beside the root of the number of channels.

  YaRN with mscale > 0 lowers the temperature of all channels, rotated or not.

  Source: DeepSeek-V2 (2024), section 3.1.4 and the published configuration's mscale_all_dim.
  """
  return _growth(cfg, cfg.mscale) ** 2 if cfg.rope_type == "yarn" and cfg.mscale else 1.0


def apply_rope(x_BTHC: jax.Array, cos_BTC: jax.Array, sin_BTC: jax.Array) -> jax.Array:
  """x_BTHC with channel pairs (c, c + C/2) of every head rotated, in x's type.

  Source: Su et al., RoFormer (2021), section 3.2; pairs are halves of the head, as in Llama.
  """
  cos = cos_BTC[:, :, None].astype(np.promote_types(x_BTHC.dtype, jnp.float32))
  sin = sin_BTC[:, :, None].astype(cos.dtype)
  left, right = jnp.split(x_BTHC.astype(cos.dtype), 2, axis=-1)
  rotated = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
  return rotated.astype(x_BTHC.dtype)


def deinterleave(x_BTHC: jax.Array) -> jax.Array:
  """Channel 2c moved to c and 2c + 1 to C/2 + c: interleaved pairs as `apply_rope` wants them.

  Scores are the same in either order, so what was rotated needs no way back.
  """
  pairs = x_BTHC.reshape(*x_BTHC.shape[:-1], -1, 2)
  return pairs.swapaxes(-1, -2).reshape(x_BTHC.shape)


def _growth(cfg: RopeConfig, mscale: float) -> float:
  return 0.1 * mscale * math.log(cfg.rope_factor) + 1


def _frequencies(num_channels: int, cfg: RopeConfig) -> np.ndarray:
  """frequency_C [radians per position] of each channel pair, float64.

  A pair that turns often within the original context is kept, the frequency of one that hardly
  turns is divided by the factor, and between them lies a ramp.
  """
  pair_C = np.arange(num_channels // 2, dtype=np.float64)
  frequency_C = cfg.rope_max_timescale ** (-2 * pair_C / num_channels)
  stretched_C = np.clip(STRETCHES[cfg.rope_type](pair_C, frequency_C, cfg), 0, 1)
  return frequency_C * (1 - stretched_C + stretched_C / cfg.rope_factor)


def _yarn(pair_C: np.ndarray, frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  """A ramp over pairs."""
  del frequency_C
  num_channels = 2 * len(pair_C)
  first = _pair_that_turns(cfg.beta_fast, num_channels, cfg)
  last = _pair_that_turns(SLOW, num_channels, cfg)
  if cfg.rope_truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, num_channels - 1)
  return (pair_C - first) / max(last - first, 1e-3)


def _llama(pair_C: np.ndarray, frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  """A ramp over turns. Source: the code published with Grattafiori et al., Llama 3 (2024)."""
  del pair_C
  turns_C = cfg.original_max_position_embeddings * frequency_C / (2 * math.pi)
  return (LLAMA_FAST - turns_C) / (LLAMA_FAST - SLOW)


# By rope_type: how much of the way from its own frequency to the stretched one each pair goes.
STRETCHES = {
  "default": lambda pair_C, frequency_C, cfg: np.zeros_like(pair_C),
  "linear": lambda pair_C, frequency_C, cfg: np.ones_like(pair_C),
  "llama3.1": _llama,
  "yarn": _yarn,
}


def _pair_that_turns(turns: float, num_channels: int, cfg: RopeConfig) -> float:
  """The (fractional) channel pair that turns so often within the original context."""
  per_radian = cfg.original_max_position_embeddings / (2 * math.pi * turns)
  return num_channels * math.log(per_radian) / (2 * math.log(cfg.rope_max_timescale))
