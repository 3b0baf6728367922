"""Auxiliary losses against closed-form values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.schema import DEFAULTS, KEYS, MoeConfig, build
from maxlite.layers.moe.losses import load_balance_loss, router_z_loss
from maxlite.layers.moe.router import Router, RouterSums

NUM_TOKENS = 60.0
NUM_ROWS = 5.0
NUM_EXPERTS = 4


def cfg_of(num_chosen=1, scope="batch"):
  keys = {"num_experts_per_tok": num_chosen, "load_balance_loss_scope": scope}
  return build(MoeConfig, DEFAULTS | {"num_experts": NUM_EXPERTS} | keys)


def layers(*shares_and_probabilities, num_chosen=1, z=0.0, balance=0.0):
  """Sums of one layer per pair (share of assignments, mean probability), each per expert."""
  num_layers = len(shares_and_probabilities)
  return RouterSums(
    tokens=jnp.full(num_layers, NUM_TOKENS),
    count_E=jnp.stack(
      [NUM_TOKENS * num_chosen * jnp.array(s) for s, _ in shares_and_probabilities]
    ),
    prob_E=jnp.stack([NUM_TOKENS * jnp.array(p) for _, p in shares_and_probabilities]),
    z=jnp.full(num_layers, z),
    rows=jnp.full(num_layers, NUM_ROWS),
    row_balance=jnp.full(num_layers, NUM_ROWS * balance),
    dropped=jnp.full(num_layers, 7.0),
  )


EVEN = [0.25] * 4
ONE = [0.0, 1.0, 0.0, 0.0]
TWO = [0.5, 0.0, 0.5, 0.0]


@pytest.mark.parametrize(
  ("share", "probability", "num_chosen", "loss"),
  [
    (EVEN, EVEN, 1, 1),
    (EVEN, EVEN, 3, 1),
    (ONE, EVEN, 1, 1),  # the choice alone adds no loss: it has no gradient
    (EVEN, ONE, 1, 1),
    (ONE, ONE, 1, NUM_EXPERTS),
    (TWO, TWO, 2, NUM_EXPERTS / 2),
    (TWO, ONE, 2, 0),
  ],
)
def test_load_balance_in_closed_form(share, probability, num_chosen, loss):
  sums_N = layers((share, probability), num_chosen=num_chosen)
  assert load_balance_loss(sums_N, cfg_of(num_chosen)) == pytest.approx(loss)


def test_layers_are_averaged_after_their_products():
  sums_N = layers((ONE, ONE), (EVEN, EVEN))
  assert load_balance_loss(sums_N, cfg_of()) == pytest.approx((NUM_EXPERTS + 1) / 2)


def test_the_gradient_lowers_the_probability_of_overloaded_experts():
  share = [0.1, 0.6, 0.3, 0.0]
  gradient = jax.grad(load_balance_loss)(layers((share, EVEN)), cfg_of())
  expected_E = NUM_EXPERTS * np.array(share) / NUM_TOKENS
  np.testing.assert_allclose(gradient.prob_E[0], expected_E, rtol=1e-6)


def test_z_loss_is_a_mean_over_tokens_and_layers():
  assert router_z_loss(layers((EVEN, EVEN), (ONE, ONE), z=90.0)) == pytest.approx(1.5)


def test_a_batch_of_padding_has_no_loss():
  nothing = jax.tree.map(jnp.zeros_like, layers((EVEN, EVEN)))
  for scope in KEYS["load_balance_loss_scope"].field.choices:
    assert load_balance_loss(nothing, cfg_of(2, scope)) == router_z_loss(nothing) == 0


def test_the_sequence_scope_averages_over_rows_and_layers():
  sums_N = layers((EVEN, EVEN), (ONE, ONE), balance=1.0)
  sums_N = sums_N.replace(row_balance=NUM_ROWS * jnp.array([1.0, 2.0]))
  assert load_balance_loss(sums_N, cfg_of(2, "sequence")) == pytest.approx(1.5)


@pytest.mark.parametrize("router", ["softmax_topk", "sigmoid_group_topk"])
def test_uneven_rows_may_form_an_even_batch(router):
  """Row b has three tokens, which all choose expert b, and one position of padding."""
  cfg = dataclasses.replace(cfg_of(), router=router)
  logits_EE = 20 * np.eye(NUM_EXPERTS, dtype=np.float32) - 20
  x_BTD = np.tile(np.eye(NUM_EXPERTS, dtype=np.float32)[:, None], (1, 4, 1))
  segment_BT = np.tile(np.array([1, 1, 2, 0], np.int32), (NUM_EXPERTS, 1))
  params = {"params": {"kernel": logits_EE}}
  module = Router(cfg, jnp.dtype(jnp.float32))
  sums = jax.jit(module.apply)(params, x_BTD, segment_BT).sums
  sums_N = jax.tree.map(lambda leaf: leaf[None], sums)
  over_sequences = dataclasses.replace(cfg, load_balance_loss_scope="sequence")
  assert load_balance_loss(sums_N, cfg) == pytest.approx(1, rel=1e-5)
  assert load_balance_loss(sums_N, over_sequences) == pytest.approx(NUM_EXPERTS, rel=1e-5)
