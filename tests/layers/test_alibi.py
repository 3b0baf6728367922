"""ALiBi as a channel of keys equals a bias of the scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.needs import needs_transformers

from maxlite.kernels.attention.reference import AttentionMask, ScoreOptions, attention
from maxlite.layers.alibi import alibi_slopes, key_bias, with_bias

NUM_POSITIONS = 9
SEGMENT_BT = np.repeat([[1, 2]], [5, 4], axis=1).astype(np.int32)


def draw(seed, shape):
  return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("num_heads", [4, 6])
def test_scores_fall_by_the_slope_times_the_distance(num_heads):
  shape = (1, NUM_POSITIONS, num_heads, 4)
  with jax.enable_x64(True):
    q, k, v = (draw(seed, shape) for seed in range(3))
    position_BT = np.concatenate([np.arange(5), np.arange(4)])[None]

    @jax.jit
    def attend(q, k, v):
      bias_BTH = key_bias(position_BT, num_heads)
      y = attention(
        with_bias(q, 1.0, 8),
        with_bias(k, bias_BTH, 8),
        v,
        AttentionMask(SEGMENT_BT, SEGMENT_BT, 0, None),
        ScoreOptions(0.5, 4),
      )
      return y, bias_BTH

    got, bias_BTH = attend(q, k, v)
  slope_H = np.asarray(bias_BTH)[0, 1]
  distance_TS = np.arange(NUM_POSITIONS)[:, None] - np.arange(NUM_POSITIONS)
  scores = np.einsum("bthc,bshc->bhts", q, k) - slope_H[None, :, None, None] * distance_TS
  is_seen = (distance_TS >= 0) & (SEGMENT_BT[0][:, None] == SEGMENT_BT[0])
  weight = np.where(is_seen, np.exp(0.5 * scores), 0)
  weight /= weight.sum(-1, keepdims=True)
  np.testing.assert_allclose(got, np.einsum("bhts,bshc->bthc", weight, v), rtol=1e-9)


def test_slopes_are_powers_of_two_and_those_between_them():
  np.testing.assert_array_equal(alibi_slopes(8), 2.0 ** -np.arange(1, 9))
  np.testing.assert_allclose(alibi_slopes(6)[:4], 2.0 ** (-2.0 * np.arange(1, 5)))
  np.testing.assert_allclose(alibi_slopes(6)[4:], [0.5, 0.125])


@pytest.mark.hf
@needs_transformers
@pytest.mark.parametrize("num_heads", [4, 6, 32, 71])
def test_the_bias_of_2000_positions_has_the_bits_of_transformers(num_heads):
  import torch
  from transformers.models.falcon.modeling_falcon import build_alibi_tensor

  theirs = build_alibi_tensor(torch.ones((1, 2000), dtype=torch.long), num_heads, torch.float32)
  ours = jax.jit(key_bias, static_argnums=1)(jnp.arange(2000)[None], num_heads)
  np.testing.assert_array_equal(ours[0].T, theirs[:, 0].numpy())
