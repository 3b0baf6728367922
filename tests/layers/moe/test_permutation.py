"""Tokens as rows of experts and back: a stable sort, and exact adjoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute

NUM_TOKENS, NUM_CHOSEN, NUM_EXPERTS, DIM = 12, 2, 5, 3
NUM_ROWS = NUM_TOKENS * NUM_CHOSEN
NOWHERE = NUM_EXPERTS
ROUTINGS = {
  "uniform": np.arange(24) % 5,
  "skewed": np.repeat([4, 0, 4, 2, 4], [2, 3, 16, 1, 2]),
  "one hot": np.full(24, 3),
  "empty at both ends": 1 + np.arange(24) % 3,
  "some nowhere": np.where(np.arange(24) % 4 == 1, NOWHERE, np.arange(24) % 3),
  "none anywhere": np.full(24, -1),
}
sort = jax.jit(sort_by_expert, static_argnums=(1, 2))


def layout_of(expert_A, num_rows=NUM_ROWS):
  expert_TK = expert_A.reshape(NUM_TOKENS, NUM_CHOSEN).astype(np.int32)
  return sort(expert_TK, NUM_EXPERTS, num_rows)


def sorted_assignments(expert_A):
  order_A = np.argsort(expert_A, kind="stable")
  return np.array([a for a in order_A if 0 <= expert_A[a] < NUM_EXPERTS], int)


def check_sorting(expert_A):
  layout, group_sizes_E = layout_of(expert_A)
  order = sorted_assignments(expert_A)
  np.testing.assert_array_equal(layout.assignment_M[: order.size], order)
  assert (np.asarray(layout.assignment_M[order.size :]) == NUM_ROWS).all()
  row_A = np.asarray(layout.row_TK).reshape(-1)
  np.testing.assert_array_equal(row_A[order], np.arange(order.size))
  assert (np.delete(row_A, order) == NUM_ROWS).all()
  sizes = np.bincount(expert_A[order], minlength=NUM_EXPERTS)
  np.testing.assert_array_equal(group_sizes_E, sizes)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_are_stably_sorted(routing):
  check_sorting(ROUTINGS[routing])


@settings(max_examples=25, deadline=None)
@given(chosen=st.sets(st.integers(-1, NOWHERE), min_size=1).map(sorted), seed=st.integers(0, 99))
def test_rows_are_stably_sorted_whatever_experts_are_chosen(chosen, seed):
  check_sorting(np.random.default_rng(seed).choice(chosen, NUM_ROWS))


def draw(shape, seed):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def plain_spread(x_TD, expert_A, num_rows):
  order = sorted_assignments(expert_A)
  x_MD = jnp.zeros((num_rows, x_TD.shape[1]), x_TD.dtype)
  return x_MD.at[: order.size].set(x_TD[order // NUM_CHOSEN])


@pytest.mark.parametrize("num_rows", [NUM_ROWS, NUM_ROWS + 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_values_and_gradients_are_those_of_plain_indexing(routing, num_rows):
  """`unpermute` is checked as the transpose of the plain `permute`, which it must be."""
  expert_A = ROUTINGS[routing]
  order = sorted_assignments(expert_A)
  with jax.enable_x64(True):
    layout, _ = layout_of(expert_A, num_rows)
    x_TD, y_MD, weight_TK = draw((NUM_TOKENS, DIM), 0), draw((num_rows, DIM), 1), draw((12, 2), 2)
    x_MD, pull_back = jax.vjp(lambda x: permute(x, layout), x_TD)
    plain_x_MD, plain_pull_back = jax.vjp(lambda x: plain_spread(x, expert_A, num_rows), x_TD)
    np.testing.assert_array_equal(x_MD, plain_x_MD)
    np.testing.assert_allclose(pull_back(y_MD)[0], plain_pull_back(y_MD)[0], atol=1e-14)

    y_TD, pull_back = jax.vjp(lambda y: unpermute(y, layout), y_MD)
    np.testing.assert_allclose(y_TD, plain_pull_back(y_MD)[0], atol=1e-14)
    np.testing.assert_array_equal(pull_back(x_TD)[0], plain_x_MD)

    weight_M, pull_back = jax.vjp(lambda w: permute_weights(w, layout), weight_TK)
    np.testing.assert_array_equal(weight_M[: order.size], weight_TK.reshape(-1)[order])
    assert not np.any(weight_M[order.size :])
    dweight_A = np.zeros(NUM_ROWS)
    dweight_A[order] = y_MD[: order.size, 0]
    np.testing.assert_array_equal(pull_back(y_MD[:, 0])[0].reshape(-1), dweight_A)


def test_rows_without_an_assignment_reach_no_token():
  with jax.enable_x64(True):
    layout, _ = layout_of(ROUTINGS["some nowhere"])
    y_MD = draw((NUM_ROWS, DIM), 1).at[18:].set(jnp.nan)
    assert np.isfinite(unpermute(y_MD, layout)).all()


def test_a_token_of_many_experts_sums_its_rows_in_float32():
  """In bfloat16, 1/256 added to 1 is lost each time; the sum of all is not."""
  num_chosen = 65
  layout, _ = sort(np.arange(num_chosen, dtype=np.int32)[None], num_chosen, num_chosen)
  y_MD = np.full((num_chosen, 1), 2.0**-8, jnp.bfloat16)
  y_MD[0] = 1
  assert float(unpermute(y_MD, layout)[0, 0]) == 1.25
