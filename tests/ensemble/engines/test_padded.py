"""Members of different sizes on zero-padded arrays: they equal solo runs, or are refused."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from families import MLP, STEPS, batch, largest_error, loss, predict, train_alone
from support.slow_cases import slow

from maxlite.ensemble import Ensemble, Member
from maxlite.errors import UserError

TOLERANCE = 1e-6
OPTIMIZER = optax.sgd(0.1, momentum=0.9)
BY_MEAN = optax.chain(optax.scale_by_param_block_rms(), optax.sgd(0.1))  # over all elements


def padded(models, optimizer=OPTIMIZER):
  members = [Member(model, optimizer, seed=z) for z, model in enumerate(models)]
  ensemble = Ensemble(members, loss, predict=predict, strategy="padded", devices=jax.devices()[:1])
  return members, ensemble


def test_padded_members_equal_members_trained_alone():
  members, ensemble = padded([MLP((3, 2)), MLP((5, 4))])
  state = ensemble.init(batch(0))
  losses = []
  for n in range(STEPS):
    state, metrics = ensemble.step(state, batch(n))
    losses.append(np.asarray(metrics["loss"]))
  want = [train_alone(member) for member in members]
  want_ZS = np.stack([result.losses_S for result in want])
  assert largest_error(np.stack(losses, axis=1), want_ZS) <= TOLERANCE
  ends = [ensemble.member_params(state, name) for name in ensemble.names]
  assert largest_error(ends, [result.end for result in want]) <= TOLERANCE
  inputs_BTD, _ = batch(0)
  predictions = np.asarray(ensemble.predict(state, inputs_BTD).members)
  want_predictions = np.stack([result.prediction for result in want])
  assert largest_error(predictions, want_predictions) <= TOLERANCE
  states = ensemble.member_states(state)
  restored = ensemble.load_states(states)
  assert largest_error(ensemble.member_states(restored), states) == 0


@pytest.mark.slow
def test_one_member_has_no_padding():
  (member,), ensemble = padded([MLP((3, 4))])
  state = ensemble.init(batch(0))
  losses = []
  for n in range(STEPS):
    state, metrics = ensemble.step(state, batch(n))
    losses.append(np.asarray(metrics["loss"])[0])
  want = train_alone(member)
  assert largest_error(np.stack(losses), want.losses_S) <= TOLERANCE


class Means(nn.Module):
  """A module of which the mean over units would include the padding."""

  width: int

  @nn.compact
  def __call__(self, x_BTD, train=True):
    del train
    x_BD = nn.Dense(self.width)(x_BTD[:, 0])
    return nn.Dense(1)(nn.LayerNorm()(x_BD))


class Normalized(nn.Module):
  """A module in which the gradient of a bias is zero but for rounding."""

  width: int

  @nn.compact
  def __call__(self, x_BTD, train=True):
    x_BD = nn.Dense(self.width)(x_BTD[:, 0])
    x_BD = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x_BD)
    return nn.Dense(1)(nn.tanh(x_BD))


@pytest.mark.slow
def test_a_gradient_that_is_zero_but_for_rounding_is_accepted():
  """Also by Adam, which makes updates of the size of the learning rate of it."""
  _, ensemble = padded([Normalized(3), Normalized(5)], optax.adam(1e-2))
  _, metrics = ensemble.step(ensemble.init(batch(0)), batch(0))
  assert not metrics["diverged"].any()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [OPTIMIZER, optax.adam(1e-2)], ids=["sgd", "adam"])
def test_members_with_such_a_gradient_have_the_losses_of_members_trained_alone(optimizer):
  members, ensemble = padded([Normalized(3), Normalized(5)], optimizer)
  state = ensemble.init(batch(0))
  for n in range(STEPS):
    state, metrics = ensemble.step(state, batch(n))
  want = [train_alone(member).losses_S[-1] for member in members]
  np.testing.assert_allclose(metrics["loss"], want, rtol=1e-5)


class Constant(nn.Module):
  """A module of which padding changes a gradient that is small, and not only by rounding."""

  width: int

  @nn.compact
  def __call__(self, x_BTD, train=True):
    del train
    offset = self.param("offset", nn.initializers.zeros, (1, 1))
    y_BD = MLP((self.width,))(x_BTD)
    return y_BD + 1e-3 / self.width * (offset - jax.lax.stop_gradient(offset))


@pytest.mark.parametrize(
  ("models", "optimizer", "message"),
  [
    ([Means(3), Means(5)], OPTIMIZER, "padding changes the loss of m0 by .*: use fused"),
    ([Constant(3), Constant(5)], OPTIMIZER, "padding changes the gradient of m0 by .*: use fused"),
    slow([MLP((3,)), MLP((5,))], BY_MEAN, "padding changes the update of m0 by .*: use fused"),
    slow([MLP((3, 5)), MLP((5, 3))], OPTIMIZER, "no member is the largest along every axis"),
    ([MLP((3,)), MLP((3, 3))], OPTIMIZER, "the same parameters and optimizer function"),
  ],
)
def test_members_that_padding_would_change_are_refused_in_one_line(models, optimizer, message):
  _, ensemble = padded(models, optimizer)
  with (
    jax.numpy_dtype_promotion("standard"),
    pytest.raises(UserError, match=message) as error,
  ):
    ensemble.step(ensemble.init(batch(0)), batch(0))
  assert "\n" not in str(error.value)
