"""Drawn models of four libraries: every strategy against the loop that a user of each writes."""

import jax
import numpy as np
import optax
import pytest
from families import largest_error
from library_models import ACTIVATIONS, BATCHES, arrays_of, loss, make_member, predict, train_alone
from support.slow_cases import slow

from maxlite.ensemble import Ensemble
from maxlite.errors import UserError

LIBRARIES = ("linen", "equinox", "nnx", "functions")
STRATEGIES = ("fused", "submesh", "switched", "stacked", "auto")
MAY_REFUSE = ("stacked", "switched")
TOLERANCE = 2e-5  # of losses and predictions, relative to the largest
ARRAYS = 1e-4  # of parameters and statistics after training
ROUNDING = 1e-5
NUM_SLOW_DRAWS = 120
BLOCK = 10


def draw_optimizer(rng):
  rate = float(rng.choice([0.1, 0.03]))
  makers = [
    lambda: optax.sgd(rate, momentum=0.9),
    lambda: optax.adam(rate, eps=1e-3),
    lambda: optax.adamw(optax.cosine_decay_schedule(rate, 4), eps=1e-3, weight_decay=0.1),
    lambda: optax.chain(optax.clip_by_global_norm(rate), optax.sgd(1.0)),
  ]
  return makers[rng.integers(len(makers))]()


def draw_fields(rng):
  depth = int(rng.integers(1, 3))
  return {
    "widths": tuple(rng.integers(2, 6, depth).tolist()),
    "act": list(ACTIVATIONS.values())[rng.integers(len(ACTIVATIONS))],
    "has_norm": bool(rng.random() < 0.5),
    "rate": float(rng.choice([0.0, 0.3])),
  }


def draw_members(rng, libraries, num_members):
  """Members of which about half are like an earlier one of their library."""
  members = []
  drawn = {}
  optimizer = draw_optimizer(rng)
  for n in range(num_members):
    library = libraries[n % len(libraries)]
    if library not in drawn or rng.random() < 0.4:
      drawn[library] = draw_fields(rng)
    if rng.random() < 0.3:
      optimizer = draw_optimizer(rng)
    seed = int(rng.integers(0, 2**31))
    given = bool(rng.random() < 0.3)
    members.append(make_member(library, drawn[library], optimizer, seed, given=given))
  return members


def check(number, libraries, num_members, strategy):
  members = draw_members(np.random.default_rng(number), libraries, num_members)
  devices = jax.devices()[: num_members if strategy == "switched" else 1]
  ensemble = Ensemble(members, loss, predict=predict, strategy=strategy, devices=devices)
  where = f"draw {number}, {strategy}: {members}"
  try:
    state = ensemble.init(BATCHES[0])
  except UserError:
    assert strategy in MAY_REFUSE, where
    return
  expected = [train_alone(member) for member in members]
  for n, batch in enumerate(BATCHES):
    state, metrics = ensemble.step(state, batch)
    want_Z = np.stack([losses_S[n] for losses_S, _, _ in expected])
    assert np.isfinite(want_Z).all(), where
    assert largest_error(np.asarray(metrics["loss"]), want_Z) <= TOLERANCE, f"step {n} of {where}"
  predictions = ensemble.predict(state, BATCHES[0]).members
  for name, prediction, (_, model, want) in zip(ensemble.names, predictions, expected, strict=True):
    assert largest_error(np.asarray(prediction), want) <= TOLERANCE * 5, where
    got_arrays = arrays_of(ensemble.member(state, name))
    for got, wanted in zip(got_arrays, arrays_of(model), strict=True):
      # A bias before a norm has no gradient but for rounding, and no size to compare with.
      limit = ARRAYS * np.max(np.abs(wanted)) + ROUNDING
      assert np.max(np.abs(np.subtract(got, wanted, dtype=np.float64))) <= limit, f"{name}, {where}"


@pytest.fixture(autouse=True)
def standard_promotion():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.parametrize("libraries", [("equinox", "nnx"), slow(LIBRARIES)])
def test_members_of_several_libraries_equal_plain_loops(libraries):
  check(1, libraries, len(libraries), "fused")


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drawn_members_of_a_library_equal_plain_loops(library, strategy):
  for number in range(2):
    check(100 + number, [library], 3, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SLOW_DRAWS, BLOCK))
def test_many_drawn_members_equal_plain_loops(first):
  for number in range(first, first + BLOCK):
    check(number, LIBRARIES, 5, STRATEGIES[number % len(STRATEGIES)])
