"""The router's choice, its weights, and the sums that losses are made of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.layers.moe.router import Router

NUM_EXPERTS, NUM_CHOSEN, DIM = 5, 2, 4
SEGMENT_BT = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0], [1] * 6, [0] * 6], np.int32)
REAL_BT = SEGMENT_BT > 0


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X_BTD, KERNEL_DE = draw((4, 6, DIM), 0), draw((DIM, NUM_EXPERTS), 1)


@functools.partial(jax.jit, static_argnames=("norm_topk_prob", "jitter"))
def route(x_BTD=X_BTD, segment_BT=SEGMENT_BT, norm_topk_prob=True, jitter=0.0, rng=None):
  router = Router(NUM_EXPERTS, NUM_CHOSEN, norm_topk_prob, jitter, jnp.float32)
  rngs = None if rng is None else {"jitter": jax.random.key(rng)}
  return router.apply({"params": {"kernel": KERNEL_DE}}, x_BTD, segment_BT, rngs=rngs)


def expected_probability(x_BTD=X_BTD):
  e_BTE = np.exp(np.float64(x_BTD) @ np.float64(KERNEL_DE))
  return e_BTE / e_BTE.sum(-1, keepdims=True)


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_likeliest_experts_weigh_by_their_probability(norm_topk_prob):
  chosen = route(norm_topk_prob=norm_topk_prob)
  p_BTE = expected_probability()
  expert_BTK = np.argsort(-p_BTE, axis=-1)[..., :NUM_CHOSEN]
  weight_BTK = np.take_along_axis(p_BTE, expert_BTK, -1)
  if norm_topk_prob:
    weight_BTK /= weight_BTK.sum(-1, keepdims=True)
  np.testing.assert_array_equal(chosen.expert_BTK, expert_BTK)
  np.testing.assert_allclose(chosen.weight_BTK, weight_BTK, rtol=1e-5)


def test_sums_leave_padding_out():
  sums, p_BTE = route().sums, expected_probability()
  real_TE = p_BTE[REAL_BT]
  best_TK = np.argsort(-real_TE, axis=-1)[:, :NUM_CHOSEN]
  z_T = np.log(np.exp(X_BTD[REAL_BT] @ KERNEL_DE).sum(-1)) ** 2
  assert float(sums.tokens) == REAL_BT.sum()
  np.testing.assert_array_equal(sums.count_E, np.bincount(best_TK.flat, minlength=NUM_EXPERTS))
  np.testing.assert_allclose(sums.prob_E, real_TE.sum(0), rtol=1e-5)
  np.testing.assert_allclose(sums.z, z_T.sum(), rtol=1e-5)

  other = np.where(REAL_BT[..., None], X_BTD, 100 * draw(X_BTD.shape, 2))
  jax.tree.map(np.testing.assert_array_equal, sums, route(other).sums)


def test_sums_of_parts_of_a_batch_add_up():
  rows = [slice(0, 1), slice(1, 3), slice(3, 4)]
  parts = [route(X_BTD[r], SEGMENT_BT[r]).sums for r in rows]
  total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
  jax.tree.map(
    lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), total, route().sums
  )


def test_routes_in_float32_whatever_comes_in():
  x_BTD = X_BTD.astype(jnp.bfloat16)
  jax.tree.map(np.testing.assert_array_equal, route(x_BTD), route(x_BTD.astype(np.float32)))
  assert route(x_BTD).weight_BTK.dtype == jnp.float32


def test_jitter_acts_only_where_a_draw_is_given():
  plain, noisy = route(), route(jitter=0.1, rng=0)
  jax.tree.map(np.testing.assert_array_equal, route(jitter=0.1), plain)
  jax.tree.map(np.testing.assert_array_equal, route(jitter=0.0, rng=0), plain)
  moved = np.abs(noisy.sums.prob_E - plain.sums.prob_E)
  assert 0 < moved.max() < 0.1 * REAL_BT.sum()
  assert (route(jitter=0.1, rng=1).sums.prob_E != noisy.sums.prob_E).any()
