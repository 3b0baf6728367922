"""Rotary embedding: rotation by position times frequency, and context extension."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.schema import RopeConfig
from maxlite.errors import UserError
from maxlite.layers.rope import (
  INTERPOLATIONS,
  apply_rope,
  deinterleave,
  query_scale,
  rope_tables,
  score_factor,
)

THETA = 100.0
NUM_CHANNELS = 8
PLAIN = RopeConfig(rope_max_timescale=THETA)
DEEPSEEK = RopeConfig(
  rope_type="yarn", rope_factor=40.0, original_max_position_embeddings=4096, mscale=0.707
)


def rotate(x_BTHC, position_BT, cfg=PLAIN):
  cos, sin = rope_tables(position_BT, NUM_CHANNELS, cfg)
  return np.asarray(apply_rope(x_BTHC, cos, sin))


def pair_frequencies(num_pairs, theta=10_000.0):
  """The frequency of each pair of channels without an extension of the context."""
  return theta ** -(np.arange(num_pairs) / num_pairs)


def angles_at_one(num_channels, cfg):
  """The angle of each pair at position 1, which is its frequency."""
  cos, sin = rope_tables(jnp.ones((1, 1), jnp.int32), num_channels, cfg)
  return np.arctan2(sin, cos)[0, 0]


def draw(seed, dtype=np.float32):
  return np.random.default_rng(seed).normal(size=(2, 5, 3, NUM_CHANNELS)).astype(dtype)


# bfloat16: computed in float32 and rounded once, by at most 2**-8 of the result.
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 0), (jnp.bfloat16, 2.0**-8)])
def test_pairs_rotate_like_complex_numbers(dtype, rtol):
  position_BT = np.array([[0, 1, 2, 3, 50], [7, 0, 1, 300, 2]], np.int32)
  x_BTHC = draw(0, dtype)
  y_BTHC = rotate(x_BTHC, position_BT)
  assert y_BTHC.dtype == dtype
  x = np.asarray(x_BTHC, np.float64)
  half = NUM_CHANNELS // 2
  frequency_C = pair_frequencies(half, THETA)
  turn = np.exp(1j * position_BT[:, :, None, None] * frequency_C)
  z = (x[..., :half] + 1j * x[..., half:]) * turn
  expected = np.concatenate([z.real, z.imag], -1)
  np.testing.assert_allclose(np.asarray(y_BTHC, np.float64), expected, rtol=rtol, atol=5e-5)


def test_tables_of_fewer_channels_rotate_the_first_ones():
  x_BTHC = draw(0)
  position_BT = np.array([[0, 1, 2, 3, 50], [7, 0, 1, 300, 2]], np.int32)
  half = NUM_CHANNELS // 2
  cos, sin = rope_tables(position_BT, half, PLAIN)
  y_BTHC = np.asarray(apply_rope(x_BTHC, cos, sin))
  first = np.asarray(apply_rope(x_BTHC[..., :half], cos, sin))
  np.testing.assert_array_equal(y_BTHC[..., :half], first)
  np.testing.assert_array_equal(y_BTHC[..., half:], x_BTHC[..., half:])
  assert np.abs(first - x_BTHC[..., :half]).max() > 0.1


def test_yarn_of_a_context_below_one_rotation_is_that_of_transformers():
  """Its ramp falls from the first pair: all frequencies are kept."""
  cfg = RopeConfig(rope_type="yarn", rope_factor=4.0, original_max_position_embeddings=1)
  np.testing.assert_allclose(angles_at_one(64, cfg), pair_frequencies(32), rtol=1e-5)


def test_a_score_depends_only_on_the_distance_of_positions():
  q_BTHC = draw(1)
  k_BTHC = draw(2)
  position_BT = np.array([[0, 1, 2, 3, 4], [3, 9, 0, 0, 8]], np.int32)

  def scores(shift):
    q = rotate(q_BTHC, position_BT + shift)
    k = rotate(k_BTHC, position_BT + shift)
    return np.einsum("bthc,bshc->bhts", q, k)

  np.testing.assert_allclose(scores(17), scores(0), atol=1e-4)
  far_q = rotate(q_BTHC, position_BT + 17)
  far_scores = np.einsum("bthc,bshc->bhts", far_q, rotate(k_BTHC, position_BT))
  assert np.abs(far_scores - scores(0)).max() > 0.1


def test_yarn_interpolates_low_frequencies_and_keeps_high_ones():
  """Rotations of a pair in 4096 tokens: over 32 up to pair 10, under 1 from pair 23."""
  plain_C = pair_frequencies(32)
  turns_C = 4096 * plain_C / (2 * np.pi)
  assert (turns_C > 32).sum() == 11
  assert (turns_C < 1).sum() == 9
  angle_C = angles_at_one(64, DEEPSEEK)
  np.testing.assert_allclose(angle_C[:11], plain_C[:11], rtol=1e-6)
  np.testing.assert_allclose(angle_C[23:], plain_C[23:] / 40, rtol=1e-5)
  slower_C = (np.arange(11, 23) - 10) / 13
  expected = plain_C[11:23] * (1 - slower_C) + plain_C[11:23] / 40 * slower_C
  np.testing.assert_allclose(angle_C[11:23], expected, rtol=1e-5)


@pytest.mark.parametrize(
  ("changes", "size", "factor"),
  [
    ({"rope_type": "default"}, 1, 1),
    ({"mscale": 0.0}, 0.1 * math.log(40) + 1, 1),
    ({}, 1, (0.0707 * math.log(40) + 1) ** 2),
  ],
  ids=["plain", "mscale=0", "mscale=0.707"],
)
def test_yarn_applies_the_temperature_once(changes, size, factor):
  cfg = dataclasses.replace(DEEPSEEK, **changes)
  cos, sin = rope_tables(jnp.arange(9, dtype=jnp.int32)[None], 64, cfg)
  np.testing.assert_allclose(np.hypot(cos, sin), size, rtol=1e-6)
  assert score_factor(cfg) == pytest.approx(factor, rel=1e-12)


def test_llama_interpolates_by_rotations_and_linear_interpolates_all():
  """Rotations of a pair in 8192 tokens: over 4 up to pair 17, under 1 from pair 21."""
  cfg = RopeConfig(rope_max_timescale=5e5, rope_factor=8.0, original_max_position_embeddings=8192)
  plain_C = pair_frequencies(32, 5e5)
  turns_C = 8192 * plain_C / (2 * np.pi)
  kept_C = np.clip((turns_C - 1) / 3, 0, 1)
  assert (kept_C == 0).sum() == 14
  assert (kept_C == 1).sum() == 15
  by_rotations_C = plain_C * kept_C + plain_C / 8 * (1 - kept_C)
  expected = {"llama3.1": by_rotations_C, "linear": plain_C / 8}
  for rope_type, frequency_C in expected.items():
    stretched = dataclasses.replace(cfg, rope_type=rope_type)
    cos, sin = rope_tables(jnp.ones((1, 1), jnp.int32), 64, stretched)
    np.testing.assert_allclose(np.arctan2(sin, cos)[0, 0], frequency_C, rtol=1e-5)
    np.testing.assert_allclose(np.hypot(cos, sin), 1, rtol=1e-6)


def test_yarn_s_ramp_may_begin_within_a_pair_and_at_fewer_rotations():
  def stretch(**changes):
    """How much slower each pair rotates."""
    cfg = dataclasses.replace(DEEPSEEK, **changes)
    return angles_at_one(64, cfg) / pair_frequencies(32)

  def pair_with(num_turns):
    """The (fractional) pair that rotates this often in 4096 tokens."""
    wavelength = 4096 / (2 * np.pi * num_turns)
    return 32 * np.log(wavelength) / np.log(10_000)

  first = pair_with(4)
  last = pair_with(1)
  stretched_C = np.clip((np.arange(32) - first) / (last - first), 0, 1)
  expected = 1 - stretched_C + stretched_C / 40
  np.testing.assert_allclose(stretch(beta_fast=4.0, rope_truncate=False), expected, rtol=1e-4)
  assert np.abs(stretch(beta_fast=4.0) - expected).max() > 0.01
  np.testing.assert_allclose(stretch(beta_fast=1.0)[[22, 23]], [1, 1 / 40], rtol=1e-4)


def test_if_all_channels_rotate_mscale_1_is_published_yarn():
  q_BTHC = draw(1)
  k_BTHC = draw(2)
  position_BT = np.array([[0, 1, 2, 3, 4], [3, 9, 0, 0, 8]], np.int32)

  def scores(mscale):
    cfg = dataclasses.replace(DEEPSEEK, mscale=mscale)
    q = rotate(q_BTHC, position_BT, cfg)
    k = rotate(k_BTHC, position_BT, cfg)
    return score_factor(cfg) * np.einsum("bthc,bshc->bhts", q, k)

  np.testing.assert_allclose(scores(1.0), scores(0.0), rtol=1e-4, atol=1e-5)


LONGROPE = RopeConfig(
  rope_type="longrope",
  rope_max_timescale=THETA,
  rope_factor=32.0,
  original_max_position_embeddings=16,
  rope_short_factor=(1.0, 1.5, 2.0, 4.0),
  rope_long_factor=(2.0, 3.0, 5.0, 9.0),
)


def wanted_frequencies(num_pairs, cfg):
  """The frequency of each channel pair in float64, one by one, from the published formulas."""
  theta = cfg.rope_max_timescale
  context = cfg.original_max_position_embeddings

  def pair_with(num_turns):
    """The (fractional) pair that rotates this often in the original context."""
    return num_pairs * math.log(context / (2 * math.pi * num_turns)) / math.log(theta)

  frequencies = []
  for pair in range(num_pairs):
    plain = theta ** (-pair / num_pairs)
    slowed = plain / cfg.rope_factor
    if cfg.rope_type in ("default", "dynamic"):
      frequencies.append(plain)
    elif cfg.rope_type == "linear":
      frequencies.append(slowed)
    elif cfg.rope_type == "llama3.1":
      kept = min(max((context * plain / (2 * math.pi) - 1) / 3, 0), 1)
      frequencies.append(kept * plain + (1 - kept) * slowed)
    elif cfg.rope_type == "llama4":
      wavelength = 2 * math.pi / plain
      frequencies.append(slowed if wavelength > context else plain)
    elif cfg.rope_type == "proportional":
      is_rotated = pair < int(2 * num_pairs * cfg.partial_rotary_factor) // 2
      frequencies.append(plain if is_rotated else 0.0)
    elif cfg.rope_type == "yarn":
      first = pair_with(cfg.beta_fast)
      last = pair_with(1)
      if cfg.rope_truncate:
        first = math.floor(first)
        last = math.ceil(last)
      first = max(first, 0)
      last = min(last, 2 * num_pairs - 1)  # of the channels, not of the pairs
      ramp = min(max((pair - first) / (last - first), 0), 1)
      frequencies.append((1 - ramp) * plain + ramp * slowed)
    else:
      factors = cfg.rope_long_factor if cfg.rope_long_context else cfg.rope_short_factor
      frequencies.append(plain / factors[pair])
  return np.array(frequencies)


# (theta, original context, number of pairs): YaRN's ramp ends among the pairs, among the channels
# but after the pairs (twice; of 64 channels at 33), after all channels, and begins before the first
# pair.
CONTEXTS = [(1e4, 4096, 32), (1e2, 4096, 8), (1e4, 65536, 32), (8.0, 32768, 8), (5e5, 128, 16)]


@pytest.mark.parametrize("context", CONTEXTS, ids=str)
@pytest.mark.parametrize("rope_type", [*INTERPOLATIONS, "longrope"])
def test_every_frequency_is_that_of_the_published_formula(rope_type, context):
  theta, num_positions, num_pairs = context
  plain = RopeConfig(
    rope_type=rope_type,
    rope_max_timescale=theta,
    rope_factor=8.0,
    original_max_position_embeddings=num_positions,
    partial_rotary_factor=0.6,
    rope_short_factor=tuple(1 + 0.5 * np.arange(num_pairs)),
    rope_long_factor=tuple(1 + 0.25 * np.arange(num_pairs) ** 2),
  )
  for changes in ({}, {"beta_fast": 5.0, "rope_truncate": False}, {"rope_long_context": True}):
    cfg = dataclasses.replace(plain, **changes)
    frequency_C = angles_at_one(2 * num_pairs, cfg)
    wanted_C = wanted_frequencies(num_pairs, cfg)
    np.testing.assert_allclose(frequency_C, wanted_C, rtol=2e-5, err_msg=str(changes))


@pytest.mark.parametrize("is_long", [False, True])
def test_longrope_divides_each_frequency_by_its_factor(is_long):
  cfg = dataclasses.replace(LONGROPE, rope_long_context=is_long)
  cos, sin = rope_tables(jnp.ones((1, 1), jnp.int32), NUM_CHANNELS, cfg)
  factors = cfg.rope_short_factor
  if is_long:
    factors = cfg.rope_long_factor
  plain_C = pair_frequencies(NUM_CHANNELS // 2, THETA)
  np.testing.assert_allclose(angles_at_one(NUM_CHANNELS, cfg), plain_C / factors, rtol=1e-5)
  size = math.sqrt(1 + math.log(32) / math.log(16))
  np.testing.assert_allclose(np.hypot(sin, cos), size, rtol=1e-5)


@pytest.mark.parametrize("rope_type", ["yarn", "longrope"])
def test_a_given_attention_factor_replaces_the_derived_one(rope_type):
  cfg = dataclasses.replace(LONGROPE, rope_type=rope_type, rope_attention_factor=1.75)
  cos, sin = rope_tables(jnp.ones((1, 1), jnp.int32), NUM_CHANNELS, cfg)
  np.testing.assert_allclose(np.hypot(sin, cos), 1.75, rtol=1e-5)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rows_beyond_the_original_context_are_refused_where_they_rotate_otherwise(rope_type):
  cfg = dataclasses.replace(LONGROPE, rope_type=rope_type)
  rope_tables(jnp.zeros((1, 16), jnp.int32), NUM_CHANNELS, cfg)
  with pytest.raises(UserError, match=f"rope_type={rope_type} .*max_target_length=16 or less"):
    rope_tables(jnp.zeros((1, 17), jnp.int32), NUM_CHANNELS, cfg)


def test_longrope_needs_a_factor_for_each_pair():
  cfg = dataclasses.replace(LONGROPE, rope_short_factor=(1.0,))
  with pytest.raises(UserError, match=r"rope_short_factor has 1 numbers, but .* 4 channel pairs"):
    rope_tables(jnp.zeros((1, 4), jnp.int32), NUM_CHANNELS, cfg)


def test_queries_grow_with_the_logarithm_of_the_contexts_before_them():
  cfg = RopeConfig(original_max_position_embeddings=10, query_scaling_beta=0.5)
  position_BT = np.array([[0, 9, 10, 19, 20, 105]], np.int32)
  contexts = np.array([[0, 0, 1, 1, 2, 10]])
  scale_BT = query_scale(position_BT, cfg)
  np.testing.assert_allclose(scale_BT, 1 + 0.5 * np.log1p(contexts), rtol=1e-6)


def test_deinterleave_moves_pairs_to_halves():
  pairs = np.arange(8, dtype=np.float32).reshape(1, 1, 1, 8)
  np.testing.assert_array_equal(deinterleave(pairs)[0, 0, 0], [0, 2, 4, 6, 1, 3, 5, 7])
