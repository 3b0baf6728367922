"""`Run.forward`, `forward_backward` and `update` are the parts of a step of `train_on`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxlite


@pytest.fixture(scope="module")
def run(finished):
  return maxlite.open_run(
    finished[0] / "run", load_balance_loss_weight=0, router_z_loss_weight=0, router_jitter=0
  )


@pytest.fixture
def batch():
  return maxlite.Batch.of(np.random.default_rng(0).integers(0, 264, (16, 16)))


def mean(log_prob_BT, batch):
  return -jnp.sum(batch.weight_BT * log_prob_BT) / jnp.sum(batch.weight_BT)


def test_steps_of_a_mean_are_those_of_train_on(run, batch):
  after, losses = run, []
  for _ in range(2):
    after, loss, log_prob_BT = after.forward_backward(batch, mean)
    losses.append(loss)
    np.testing.assert_allclose(log_prob_BT, after.forward(batch), rtol=1e-5)
    after, row = after.update()
    assert np.isfinite(row["grad_norm"])
    assert after.gradients is None
  want, rows = run.train_on([batch, batch])
  np.testing.assert_allclose(losses, [row["loss"] for row in rows], rtol=1e-5)
  assert after.step == want.step
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), after.params, want.params)


def test_gradients_add_up(run, batch):
  double, _, _ = run.forward_backward(batch)[0].forward_backward(batch)
  once, loss, log_prob_BT = run.forward_backward(batch)
  np.testing.assert_allclose(loss, -np.sum(batch.weight_BT * log_prob_BT), rtol=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a, 2 * b), double.gradients, once.gradients
  )


def test_an_update_without_gradients_is_one_line(run):
  with pytest.raises(maxlite.UserError, match=r"call forward_backward\(\.\.\.\) first"):
    run.update()
