"""Rotary position embedding, with optional context extension."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import RopeConfig
from maxlite.errors import UserError
from maxlite.kernels.numerics import accumulator_dtype

# Numbers of rotations over the original context. Channel pairs with fewer than SLOW are
# interpolated. Llama 3.1 keeps those with more than LLAMA_FAST, Llama 4 all others; YaRN has
# cfg.beta_fast.
SLOW = 1.0
LLAMA_FAST = 4.0


class RopeTables(NamedTuple):
  """The rotation of each channel pair at each position, float32."""

  cos_BTC: jax.Array
  sin_BTC: jax.Array


def rope_tables(position_BT: jax.Array, num_channels: int, cfg: RopeConfig) -> RopeTables:
  """The rotations of `num_channels` channels, so C = num_channels / 2.

  YaRN and LongRoPE lower the temperature of attention: both tables are scaled, which affects the
  rotated channels only (see `_table_size`). With mscale > 0, `score_factor` applies YaRN's.

  Source: Peng et al., YaRN (2023), sections 2.2 (linear) and 3.4; Ding et al., LongRoPE (2024).

  Raises:
    UserError: rows of this length have another rotation, which depends on their length.
  """
  _check_length(position_BT.shape[1], cfg)
  frequency_C = jnp.asarray(_frequencies(num_channels, cfg), jnp.float32)
  position_BT1 = position_BT.astype(jnp.float32)[..., None]
  angle_BTC = position_BT1 * frequency_C[None, None]
  size = _table_size(cfg)
  return RopeTables(cos_BTC=jnp.cos(angle_BTC) * size, sin_BTC=jnp.sin(angle_BTC) * size)


def score_factor(cfg: RopeConfig) -> float:
  """The factor of attention scores in addition to 1 / sqrt(channels).

  With mscale > 0, YaRN lowers the temperature of all channels, rotated or not.

  Source: DeepSeek-V2 (2024), section 3.1.4 and the published configuration's mscale_all_dim.
  """
  if cfg.rope_type == "yarn" and cfg.mscale:
    return _yarn_growth(cfg, cfg.mscale) ** 2
  return 1.0


def query_scale(position_BT: jax.Array, cfg: RopeConfig, first: int = 0) -> jax.Array:
  """scale_BT, float32: the factor of the query at each position, which grows with its logarithm.

  Source: the code published with Mistral Small 4 (2026), which has it from Llama 4.

  Args:
    first: the number of the first position; positions of the batch count from 0.
  """
  number_BT = position_BT.astype(jnp.float32) + first
  num_contexts_BT = jnp.floor(number_BT / cfg.original_max_position_embeddings)
  return 1 + cfg.query_scaling_beta * jnp.log(1 + num_contexts_BT)


def scale_queries(q_BTHC: jax.Array, scale_BT: jax.Array | None) -> jax.Array:
  """q_BTHC * scale_BT, in q's type; without a scale unchanged."""
  if scale_BT is None:
    return q_BTHC
  return q_BTHC * scale_BT[:, :, None, None].astype(q_BTHC.dtype)


def apply_rope(x_BTHC: jax.Array, cos_BTC: jax.Array, sin_BTC: jax.Array) -> jax.Array:
  """x_BTHC with channel pairs (c, c + C/2) of every head rotated, in x's type.

  Tables with fewer pairs than the head has rotate its first channels and leave the others.

  Source: Su et al., RoFormer (2021), section 3.2; pairs are halves of the head, as in Llama.
  """
  num_rotated = 2 * cos_BTC.shape[-1]
  if num_rotated < x_BTHC.shape[-1]:
    rotated = apply_rope(x_BTHC[..., :num_rotated], cos_BTC, sin_BTC)
    others = x_BTHC[..., num_rotated:]
    return jnp.concatenate([rotated, others], axis=-1)
  dtype = accumulator_dtype(x_BTHC.dtype)
  cos = cos_BTC[:, :, None].astype(dtype)
  sin = sin_BTC[:, :, None].astype(dtype)
  left, right = jnp.split(x_BTHC.astype(dtype), 2, axis=-1)
  rotated_left = left * cos - right * sin
  rotated_right = right * cos + left * sin
  rotated = jnp.concatenate([rotated_left, rotated_right], axis=-1)
  return rotated.astype(x_BTHC.dtype)


def deinterleave(x_BTHC: jax.Array) -> jax.Array:
  """Moves channel 2c to c and 2c + 1 to C/2 + c: interleaved pairs to the layout of `apply_rope`.

  The order of channels does not affect the scores, so there is no inverse.
  """
  pairs = x_BTHC.reshape((*x_BTHC.shape[:-1], -1, 2))
  return pairs.swapaxes(-1, -2).reshape(x_BTHC.shape)


def _check_length(num_positions: int, cfg: RopeConfig) -> None:
  """Raise UserError if rows are longer than the context that `cfg` is for."""
  original = cfg.original_max_position_embeddings
  if num_positions <= original:
    return
  if cfg.rope_type == "dynamic":
    raise UserError(
      f"rows of {num_positions} tokens: rope_type=dynamic rotates texts of more than "
      f"original_max_position_embeddings={original} tokens by an angle that depends on their "
      f"length, which is not supported; write max_target_length={original} or less"
    )
  if cfg.rope_type == "longrope" and not cfg.rope_long_context:
    raise UserError(
      f"rows of {num_positions} tokens: rope_type=longrope has other frequencies for more than "
      f"original_max_position_embeddings={original} tokens; write rope_long_context=true, or "
      f"max_target_length={original} or less"
    )


def _table_size(cfg: RopeConfig) -> float:
  """The factor of the tables: given, or derived from the factor of context extension."""
  if cfg.rope_type not in ("yarn", "longrope"):
    return 1.0
  if cfg.rope_attention_factor:
    return cfg.rope_attention_factor
  if cfg.rope_type == "longrope":
    log_ratio = math.log(cfg.rope_factor) / math.log(cfg.original_max_position_embeddings)
    return math.sqrt(1 + log_ratio)
  if cfg.mscale:
    return 1.0
  return _yarn_growth(cfg, mscale=1.0)


def _yarn_growth(cfg: RopeConfig, mscale: float) -> float:
  """The factor of queries and keys by which YaRN lowers the temperature."""
  return 0.1 * mscale * math.log(cfg.rope_factor) + 1


def _frequencies(num_channels: int, cfg: RopeConfig) -> np.ndarray:
  """frequency_C [radians per position] of each channel pair, float64.

  High frequencies are kept, low ones are divided by the factor, with a ramp in between; LongRoPE
  divides each by its own factor.
  """
  pair_C = np.arange(num_channels // 2, dtype=np.float64)
  exponent_C = -2 * pair_C / num_channels
  frequency_C = cfg.rope_max_timescale**exponent_C
  if cfg.rope_type == "longrope":
    return frequency_C / _own_factors(len(frequency_C), cfg)
  interpolation = INTERPOLATIONS[cfg.rope_type]
  degree_C = np.clip(interpolation(frequency_C, cfg), 0, 1)
  factor_C = 1 - degree_C + degree_C / cfg.rope_factor
  if cfg.rope_type == "proportional":  # The first pairs of the whole head rotate.
    num_rotated = int(num_channels * cfg.partial_rotary_factor) // 2
    factor_C = np.where(pair_C < num_rotated, factor_C, 0)
  return frequency_C * factor_C


def _own_factors(num_pairs: int, cfg: RopeConfig) -> np.ndarray:
  """factor_C: LongRoPE's factor of each channel pair.

  Raises:
    UserError: the config has another number of factors.
  """
  key = "rope_short_factor"
  factors = cfg.rope_short_factor
  if cfg.rope_long_context:
    key = "rope_long_factor"
    factors = cfg.rope_long_factor
  if len(factors) != num_pairs:
    raise UserError(
      f"{key} has {len(factors)} numbers, but rope_type=longrope needs one for each of the "
      f"{num_pairs} channel pairs that rotate; write {num_pairs} numbers"
    )
  return np.array(factors, np.float64)


def _keep_all(frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  return np.zeros_like(frequency_C)


def _interpolate_all(frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  return np.ones_like(frequency_C)


def _yarn_ramp(frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  """A ramp over channel pairs, between those with beta_fast and SLOW rotations."""
  num_pairs = len(frequency_C)
  num_channels = 2 * num_pairs
  first = _pair_with_rotations(cfg.beta_fast, num_channels, cfg)
  last = _pair_with_rotations(SLOW, num_channels, cfg)
  if cfg.rope_truncate:
    first = math.floor(first)
    last = math.ceil(last)
  first = max(first, 0)
  last = min(last, num_channels - 1)
  # If the context has fewer positions than a rotation, the ramp falls, as in the published code.
  width = last - first
  if width == 0:
    width = 1e-3
  pair_C = np.arange(num_pairs)
  return (pair_C - first) / width


def _pair_with_rotations(rotations: float, num_channels: int, cfg: RopeConfig) -> float:
  """The (fractional) channel pair with this number of rotations over the original context."""
  num_positions = cfg.original_max_position_embeddings
  ratio = num_positions / (2 * math.pi * rotations)
  log_timescale = math.log(cfg.rope_max_timescale)
  return num_channels * math.log(ratio) / (2 * log_timescale)


def _llama4_step(frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  """1 for pairs with fewer than SLOW rotations. Source: the code of Llama 4 Scout (2025)."""
  rotations_C = cfg.original_max_position_embeddings * frequency_C / (2 * math.pi)
  return (rotations_C < SLOW).astype(np.float64)


def _llama_ramp(frequency_C: np.ndarray, cfg: RopeConfig) -> np.ndarray:
  """A ramp over rotations. Source: the code published with Grattafiori et al., Llama 3 (2024)."""
  num_positions = cfg.original_max_position_embeddings
  rotations_C = num_positions * frequency_C / (2 * math.pi)
  return (LLAMA_FAST - rotations_C) / (LLAMA_FAST - SLOW)


# By rope_type: each pair's degree of interpolation, from 0 (kept) to 1 (divided by the factor).
# Values outside this range are clipped.
INTERPOLATIONS = {
  "default": _keep_all,
  "dynamic": _keep_all,
  "linear": _interpolate_all,
  "llama3.1": _llama_ramp,
  "llama4": _llama4_step,
  "yarn": _yarn_ramp,
  "proportional": _keep_all,
}
