"""Rotary embedding: a rotation by position times frequency, and what follows from it."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.layers.rope import apply_rope, rope_tables

THETA, NUM_CHANNELS = 100.0, 8


def rotate(x_BTHC, position_BT):
  return np.asarray(apply_rope(x_BTHC, *rope_tables(position_BT, NUM_CHANNELS, THETA)))


def draw(seed, dtype=np.float32):
  return np.random.default_rng(seed).normal(size=(2, 5, 3, NUM_CHANNELS)).astype(dtype)


# bfloat16: computed in float32 and rounded once, by at most 2**-8 of the result.
@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 0), (jnp.bfloat16, 2.0**-8)])
def test_pairs_turn_like_complex_numbers(dtype, rtol):
  position_BT = np.array([[0, 1, 2, 3, 50], [7, 0, 1, 300, 2]], np.int32)
  x_BTHC = draw(0, dtype)
  y_BTHC = rotate(x_BTHC, position_BT)
  assert y_BTHC.dtype == dtype
  x = np.asarray(x_BTHC, np.float64)
  frequency_C = THETA ** (-2 * np.arange(NUM_CHANNELS // 2) / NUM_CHANNELS)
  turn = np.exp(1j * position_BT[:, :, None, None] * frequency_C)
  z = (x[..., : NUM_CHANNELS // 2] + 1j * x[..., NUM_CHANNELS // 2 :]) * turn
  expected = np.concatenate([z.real, z.imag], -1)
  np.testing.assert_allclose(np.asarray(y_BTHC, np.float64), expected, rtol=rtol, atol=5e-5)


def test_a_score_depends_on_the_distance_of_positions_alone():
  q_BTHC, k_BTHC = draw(1), draw(2)
  position_BT = np.array([[0, 1, 2, 3, 4], [3, 9, 0, 0, 8]], np.int32)

  def scores(shift):
    q, k = rotate(q_BTHC, position_BT + shift), rotate(k_BTHC, position_BT + shift)
    return np.einsum("bthc,bshc->bhts", q, k)

  np.testing.assert_allclose(scores(17), scores(0), atol=1e-4)
  far = np.einsum("bthc,bshc->bhts", rotate(q_BTHC, position_BT + 17), rotate(k_BTHC, position_BT))
  assert np.abs(far - scores(0)).max() > 0.1
