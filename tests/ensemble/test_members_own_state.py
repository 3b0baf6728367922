"""What a member owns, in every strategy: its hyperparameters, and its first step that diverges."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.slow_cases import fast_only, slow

from maxlite.ensemble import Ensemble, Member
from maxlite.registry import ENSEMBLE_STRATEGIES

# Strategies that compute in this process, and whose states are therefore here.
HERE = [name for name in ENSEMBLE_STRATEGIES if name != "processes"]
ROWS = np.random.default_rng(0).normal(size=(3, 4, 2)).astype(np.float32)


def poisoned_loss(model, batch):
  """The loss of a batch (rows, a number that is added to the loss)."""
  x_BD, poison = batch
  return jnp.mean((model(x_BD) - 1) ** 2) * (1 + poison)


def make_members(rate=0.1, least_b1=0.5):
  """Three members with other values of every hyperparameter."""
  members = []
  for z in range(3):
    hyperparameters = {
      "learning_rate": rate / (1 + z),
      "b1": least_b1 + 0.1 * z,
      "b2": 0.6 + 0.1 * z,
      "weight_decay": 0.01 * (1 + z),
    }
    model = nn.Dense(1)
    member = Member(model, optax.adamw, seed=z, name=f"m{z}", hyperparameters=hyperparameters)
    members.append(member)
  return {"members": members, "loss": poisoned_loss}


def make_slower_members():
  return make_members(rate=0.03, least_b1=0.7)


def make(strategy, members=make_members, own_batches=False):
  return Ensemble.from_factory(
    f"{__name__}:{members.__name__}",
    num_workers=1,
    strategy=strategy,
    devices=jax.devices()[:3],
    own_batches=own_batches,
  )


def batch_with(poison_Z):
  return ROWS, np.array(poison_Z, np.float32)


@pytest.mark.parametrize("strategy", HERE)
def test_every_hyperparameter_of_every_member_survives_load_states(strategy):
  ensemble = make(strategy)
  state = ensemble.init((ROWS[0], np.float32(0)))
  loaded = ensemble.load_states(ensemble.member_states(state))
  trees.assert_equal_leaves(loaded, state)


@pytest.mark.parametrize("strategy", fast_only(HERE, "fused"))
def test_a_loaded_state_goes_on_with_the_hyperparameters_of_its_ensemble(strategy):
  """With the moments of the ensemble that saved it, and not with its hyperparameters."""
  batch = (ROWS[0], np.float32(0))
  saving = make(strategy)
  state, _ = saving.step(saving.init(batch), batch)
  saved = jax.device_get(saving.member_states(state))
  loading = make(strategy, make_slower_members)
  loading.init(batch)
  loaded, _ = loading.step(loading.load_states(saved), batch)
  for member in make_slower_members()["members"]:
    before = saved[member.name]

    def loss_of(params):
      return poisoned_loss(lambda x_BD: nn.Dense(1).apply({"params": params}, x_BD), batch)

    gradients = jax.grad(loss_of)(before.params)
    solo = optax.adamw(**member.hyperparameters)
    with jax.numpy_dtype_promotion("standard"):
      updates, _ = solo.update(gradients, before.opt_state, before.params)
    expected = optax.apply_updates(before.params, updates)
    for found, wanted in trees.leaf_pairs(loading.member_params(loaded, member.name), expected):
      np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.slow
def test_worker_processes_keep_every_hyperparameter_through_load_states():
  """From the second step on, Adam's moments depend on all of them."""
  ensemble = make("processes")
  batch = (ROWS[0], np.float32(0))
  state, _ = ensemble.step(ensemble.init(batch), batch)
  before = ensemble.member_states(state)
  state, _ = ensemble.step(state, batch)
  expected = ensemble.member_states(state)
  loaded, _ = ensemble.step(ensemble.load_states(before), batch)
  trees.assert_equal_leaves(ensemble.member_states(loaded), expected)


@pytest.mark.parametrize("strategy", [*HERE, slow("processes")])
def test_a_member_stays_as_it_was_before_its_first_bad_step(strategy):
  """Though its later losses are finite; the others go on."""
  ensemble = make(strategy, own_batches=True)
  state = ensemble.init(batch_with([0, 0, 0]))
  history = []
  for poison_Z in ([0, 0, 0], [0, np.nan, 0], [0, 0, 0]):
    state, metrics = ensemble.step(state, batch_with(poison_Z))
    params = [ensemble.member_params(state, name) for name in ensemble.names]
    history.append((np.asarray(metrics["diverged"]), jax.device_get(params)))
  (good, first), (bad, _), (after, last) = history
  assert not good.any()
  np.testing.assert_array_equal(bad, [False, True, False])
  np.testing.assert_array_equal(after, [False, True, False])
  trees.assert_equal_leaves(last[1], first[1])
  for z in (0, 2):
    for old, new in trees.leaf_pairs(first[z], last[z]):
      assert np.any(old != new)
