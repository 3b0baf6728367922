"""Sorting tokens by expert and back: a stable permutation, and exact adjoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.layers.moe.dispatch import build_plan, combine, fetch, send

NUM_TOKENS, NUM_CHOSEN, NUM_EXPERTS, DIM = 12, 2, 5, 3
ROUTINGS = {
  "uniform": np.arange(24) % 5,
  "skewed": np.repeat([4, 0, 4, 2, 4], [2, 3, 16, 1, 2]),
  "one hot": np.full(24, 3),
  "empty at both ends": 1 + np.arange(24) % 3,
}
make_plan = jax.jit(build_plan, static_argnums=1)


def plan_of(expert_A):
  return make_plan(expert_A.reshape(NUM_TOKENS, NUM_CHOSEN).astype(np.int32), NUM_EXPERTS)


def check_plan(expert_A):
  plan = plan_of(expert_A)
  order_A = np.argsort(expert_A, kind="stable")
  np.testing.assert_array_equal(plan.order_A, order_A)
  np.testing.assert_array_equal(plan.inverse_A[order_A], np.arange(24))
  np.testing.assert_array_equal(plan.group_sizes_E, np.bincount(expert_A, minlength=NUM_EXPERTS))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_plan_is_the_stable_sort(routing):
  check_plan(ROUTINGS[routing])


@settings(max_examples=25, deadline=None)
@given(
  chosen=st.sets(st.integers(0, NUM_EXPERTS - 1), min_size=1).map(sorted), seed=st.integers(0, 99)
)
def test_a_plan_is_the_stable_sort_whatever_experts_are_chosen(chosen, seed):
  check_plan(np.random.default_rng(seed).choice(chosen, NUM_TOKENS * NUM_CHOSEN))


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_send_and_fetch_are_each_others_adjoint(routing):
  """<send(x), y> = <x, sum over k of fetch(y)>."""
  with jax.enable_x64(True):
    plan = plan_of(ROUTINGS[routing])
    x_TD, y_MD = draw((NUM_TOKENS, DIM), 0), draw((NUM_TOKENS * NUM_CHOSEN, DIM), 1)
    back_TD = np.asarray(fetch(y_MD, plan)).reshape(NUM_TOKENS, NUM_CHOSEN, DIM).sum(1)
    assert np.vdot(send(x_TD, plan), y_MD) == pytest.approx(np.vdot(x_TD, back_TD), rel=1e-13)


def plain_send(x_TD, expert_A):
  return x_TD[np.argsort(expert_A, kind="stable") // NUM_CHOSEN]


def plain_combine(y_MD, weight_TK, expert_A):
  row_TK = np.argsort(np.argsort(expert_A, kind="stable")).reshape(weight_TK.shape)
  return jnp.einsum("tkd,tk->td", y_MD[row_TK], weight_TK)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_values_and_gradients_are_those_of_plain_indexing(routing):
  expert_A = ROUTINGS[routing]
  with jax.enable_x64(True):
    plan = plan_of(expert_A)
    x_TD, y_MD = jnp.asarray(draw((NUM_TOKENS, DIM), 0)), jnp.asarray(draw((24, DIM), 1))
    weight_TK = jnp.asarray(draw((NUM_TOKENS, NUM_CHOSEN), 2))
    pairs = (
      (lambda x: send(x, plan), lambda x: plain_send(x, expert_A), (x_TD,)),
      (
        lambda y, weight: combine(y, weight, plan),
        lambda y, weight: plain_combine(y, weight, expert_A),
        (y_MD, weight_TK),
      ),
    )
    for ours, plain, operands in pairs:
      (got, pull_back), (want, plain_pull_back) = (
        jax.vjp(ours, *operands),
        jax.vjp(plain, *operands),
      )
      cotangent = jnp.asarray(draw(want.shape, 3))
      for a, b in zip(
        (got, *pull_back(cotangent)), (want, *plain_pull_back(cotangent)), strict=True
      ):
        np.testing.assert_allclose(a, b, atol=1e-14)


def test_a_token_of_many_experts_sums_its_gradient_in_float32():
  """In bfloat16, 1/256 added to 1 is lost each time; the sum of all is not."""
  num_chosen = 65
  plan = make_plan(np.arange(num_chosen, dtype=np.int32)[None], num_chosen)
  cotangent = np.full((num_chosen, 1), 2.0**-8, jnp.bfloat16)
  cotangent[0] = 1
  _, pull_back = jax.vjp(lambda x: send(x, plan), np.ones((1, 1), jnp.bfloat16))
  assert float(pull_back(cotangent)[0][0, 0]) == 1.25
