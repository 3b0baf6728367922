"""Permutation of tokens into rows of experts and back: stable sort, exact adjoints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.layers.moe.permutation import permute, permute_weights, sort_by_expert, unpermute

NUM_TOKENS = 12
NUM_CHOSEN = 2
NUM_EXPERTS = 5
DIM = 3
NUM_ROWS = NUM_TOKENS * NUM_CHOSEN
MASKED = NUM_EXPERTS
ROUTINGS = {
  "uniform": np.arange(24) % 5,
  "skewed": np.repeat([4, 0, 4, 2, 4], [2, 3, 16, 1, 2]),
  "one hot": np.full(24, 3),
  "empty at both ends": 1 + np.arange(24) % 3,
  "some masked": np.where(np.arange(24) % 4 == 1, MASKED, np.arange(24) % 3),
  "all masked": np.full(24, -1),
}
sort = jax.jit(sort_by_expert, static_argnums=(1, 2))


def permutation_of(expert_A, num_rows=NUM_ROWS):
  expert_TK = expert_A.reshape(NUM_TOKENS, NUM_CHOSEN).astype(np.int32)
  return sort(expert_TK, NUM_EXPERTS, num_rows)


def sorted_assignments(expert_A):
  order_A = np.argsort(expert_A, kind="stable")
  return np.array([a for a in order_A if 0 <= expert_A[a] < NUM_EXPERTS], int)


def check_sorting(expert_A):
  permutation, group_sizes_E = permutation_of(expert_A)
  order = sorted_assignments(expert_A)
  np.testing.assert_array_equal(permutation.assignment_M[: order.size], order)
  assert (np.asarray(permutation.assignment_M[order.size :]) == NUM_ROWS).all()
  row_A = np.asarray(permutation.row_TK).reshape(-1)
  np.testing.assert_array_equal(row_A[order], np.arange(order.size))
  assert (np.delete(row_A, order) == NUM_ROWS).all()
  sizes = np.bincount(expert_A[order], minlength=NUM_EXPERTS)
  np.testing.assert_array_equal(group_sizes_E, sizes)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_are_stably_sorted(routing):
  check_sorting(ROUTINGS[routing])


@settings(max_examples=25, deadline=None)
@given(chosen=st.sets(st.integers(-1, MASKED), min_size=1).map(sorted), seed=st.integers(0, 99))
def test_rows_are_stably_sorted_for_any_experts(chosen, seed):
  check_sorting(np.random.default_rng(seed).choice(chosen, NUM_ROWS))


def draw(shape, seed):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def plain_permute(x_TD, expert_A, num_rows):
  order = sorted_assignments(expert_A)
  x_MD = jnp.zeros((num_rows, x_TD.shape[1]), x_TD.dtype)
  return x_MD.at[: order.size].set(x_TD[order // NUM_CHOSEN])


@pytest.mark.parametrize("num_rows", [NUM_ROWS, NUM_ROWS + 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_values_and_gradients_equal_plain_indexing(routing, num_rows):
  """`unpermute` is compared with the transpose of the plain `permute`."""
  expert_A = ROUTINGS[routing]
  order = sorted_assignments(expert_A)
  live = slice(0, order.size)  # rows with an assignment
  with jax.enable_x64(True):
    permutation, _ = permutation_of(expert_A, num_rows)
    x_TD = draw((NUM_TOKENS, DIM), 0)
    y_MD = draw((num_rows, DIM), 1)
    plain_x_MD, plain_pull_back = jax.vjp(lambda x: plain_permute(x, expert_A, num_rows), x_TD)
    (plain_y_TD,) = plain_pull_back(y_MD)

    x_MD, pull_back = jax.vjp(lambda x: permute(x, permutation), x_TD)
    (dx_TD,) = pull_back(y_MD)
    np.testing.assert_array_equal(x_MD[live], plain_x_MD[live])
    np.testing.assert_allclose(dx_TD, plain_y_TD, atol=1e-14)

    y_TD, pull_back = jax.vjp(lambda y: unpermute(y, permutation), y_MD)
    (dy_MD,) = pull_back(x_TD)
    np.testing.assert_allclose(y_TD, plain_y_TD, atol=1e-14)
    np.testing.assert_array_equal(dy_MD[live], plain_x_MD[live])


@pytest.mark.parametrize("num_rows", [NUM_ROWS, NUM_ROWS + 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_weights_are_permuted_as_their_rows(routing, num_rows):
  expert_A = ROUTINGS[routing]
  order = sorted_assignments(expert_A)
  num_live = order.size
  with jax.enable_x64(True):
    permutation, _ = permutation_of(expert_A, num_rows)
    weight_TK = draw((NUM_TOKENS, NUM_CHOSEN), 2)
    weight_M, pull_back = jax.vjp(lambda w: permute_weights(w, permutation), weight_TK)
    np.testing.assert_array_equal(weight_M[:num_live], weight_TK.reshape(-1)[order])
    assert not np.any(weight_M[num_live:])
    dweight_M = draw(num_rows, 1)
    (dweight_TK,) = pull_back(dweight_M)
    want_A = np.zeros(NUM_ROWS)
    want_A[order] = dweight_M[:num_live]
    np.testing.assert_array_equal(dweight_TK.reshape(-1), want_A)


def test_rows_without_an_assignment_do_not_affect_tokens():
  with jax.enable_x64(True):
    permutation, _ = permutation_of(ROUTINGS["some masked"])
    y_MD = draw((NUM_ROWS, DIM), 1).at[18:].set(jnp.nan)
    assert np.isfinite(unpermute(y_MD, permutation)).all()


def test_rows_of_a_token_are_summed_in_float32():
  """In bfloat16, each addition of 1/256 to 1 would be rounded away."""
  num_chosen = 65
  permutation, _ = sort(np.arange(num_chosen, dtype=np.int32)[None], num_chosen, num_chosen)
  y_MD = np.full((num_chosen, 1), 2.0**-8, jnp.bfloat16)
  y_MD[0] = 1
  assert float(unpermute(y_MD, permutation)[0, 0]) == 1.25
