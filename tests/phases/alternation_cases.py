"""A case of alternating training: two phases on the layers a, b and c, and what tests share.

The fit phase trains a and b; the match phase trains c to equal b. No phase trains d.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlite.phases import Alternation, Phase

WIDTH = 8
ROWS = 16
FIT_ADAM = optax.adam(optax.linear_schedule(3e-2, 0.0, 10))
MATCH_ADAM = optax.adamw(1e-2)


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_params():
  params = {}
  for seed, name in enumerate("abcd"):
    kernel = draw((WIDTH, WIDTH), seed) / 3
    params[name] = {"kernel": kernel, "bias": np.zeros(WIDTH, np.float32)}
  return params


def layer(params, x_BD):
  return jnp.tanh(x_BD @ params["kernel"] + params["bias"][None])


def fit_loss(params, batch):
  x_BD, y_BD = batch
  h_BD = layer(params["a"], x_BD)
  error_BD = layer(params["b"], h_BD) - y_BD
  return jnp.mean(error_BD**2)


def match_loss(params, batch):
  x_BD, _ = batch
  h_BD = layer(params["a"], x_BD)
  gap_BD = layer(params["c"], h_BD) - layer(params["b"], h_BD)
  return jnp.mean(gap_BD**2), {"gap": jnp.max(jnp.abs(gap_BD))}


def batches(num, first=0):
  for seed in range(first, first + num):
    x_BD = draw((ROWS, WIDTH), 100 + seed)
    y_BD = draw((ROWS, WIDTH), 200 + seed)
    yield x_BD, y_BD


def a_to_b_and_c(strategy="separate", match=match_loss, **keys):
  phases = [
    Phase("fit", ["a/.*", "b/.*"], fit_loss, FIT_ADAM, steps=3),
    Phase("match", ["c/.*"], match, MATCH_ADAM, steps=2),
  ]
  return Alternation(phases, initial_phases={"fit": 2}, strategy=strategy, **keys)


def own_state(state, phase):
  """The state of a phase's optimizer."""
  partitioned = state.opt_state.own[phase]
  return partitioned.inner_states["train"].inner_state


def take(alternation, state, stream):
  """(state, metrics of each step) on the host."""
  rows = []
  for batch in stream:
    state, metrics = alternation.step(state, batch)
    rows.append(jax.device_get(metrics))
  return state, rows


def assert_same(got, want):
  """Assert that two trees are equal bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(got), jax.device_get(want))
  assert jax.tree.structure(got) == jax.tree.structure(want)


def assert_close(got, want):
  """Assert that two trees are equal up to the order of sums."""

  def assert_leaf_close(leaf, expected):
    np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)

  jax.tree.map(assert_leaf_close, jax.device_get(got), jax.device_get(want))
