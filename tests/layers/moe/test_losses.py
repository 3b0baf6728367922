"""Auxiliary losses where their values are known in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.layers.moe.losses import load_balance_loss, router_z_loss
from maxlite.layers.moe.router import RouterSums

NUM_TOKENS, NUM_EXPERTS = 60.0, 4


def layers(*shares_and_probabilities, num_chosen=1, z=0.0):
  """Sums of one layer per pair (share of assignments, mean probability) of each expert."""
  return RouterSums(
    tokens=jnp.full(len(shares_and_probabilities), NUM_TOKENS),
    count_E=jnp.stack(
      [NUM_TOKENS * num_chosen * jnp.array(s) for s, _ in shares_and_probabilities]
    ),
    prob_E=jnp.stack([NUM_TOKENS * jnp.array(p) for _, p in shares_and_probabilities]),
    z=jnp.full(len(shares_and_probabilities), z),
  )


EVEN, ONE, TWO = [0.25] * 4, [0.0, 1.0, 0.0, 0.0], [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
  ("share", "probability", "num_chosen", "loss"),
  [
    (EVEN, EVEN, 1, 1),
    (EVEN, EVEN, 3, 1),
    (ONE, EVEN, 1, 1),  # the choice alone costs nothing: it has no gradient
    (EVEN, ONE, 1, 1),
    (ONE, ONE, 1, NUM_EXPERTS),
    (TWO, TWO, 2, NUM_EXPERTS / 2),
    (TWO, ONE, 2, 0),
  ],
)
def test_load_balance_in_closed_form(share, probability, num_chosen, loss):
  sums_N = layers((share, probability), num_chosen=num_chosen)
  assert load_balance_loss(sums_N, num_chosen) == pytest.approx(loss)


def test_layers_are_averaged_after_their_products():
  assert load_balance_loss(layers((ONE, ONE), (EVEN, EVEN)), 1) == pytest.approx(2.5)


def test_the_gradient_lowers_the_probability_of_crowded_experts():
  share = [0.1, 0.6, 0.3, 0.0]
  gradient = jax.grad(load_balance_loss)(layers((share, EVEN)), 1)
  expected_E = NUM_EXPERTS * np.array(share) / NUM_TOKENS
  np.testing.assert_allclose(gradient.prob_E[0], expected_E, rtol=1e-6)


def test_z_loss_is_a_mean_over_tokens_and_layers():
  assert router_z_loss(layers((EVEN, EVEN), (ONE, ONE), z=90.0)) == pytest.approx(1.5)


def test_a_batch_of_padding_costs_nothing():
  nothing = jax.tree.map(jnp.zeros_like, layers((EVEN, EVEN)))
  assert load_balance_loss(nothing, 2) == router_z_loss(nothing) == 0
