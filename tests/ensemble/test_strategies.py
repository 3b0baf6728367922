"""Every strategy gives each member what it would have got alone."""

import functools

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from families import (
  FAMILIES,
  STEPS,
  alone,
  batch,
  largest_error,
  loss,
  predict,
  together,
  train_alone,
)

from maxlite.ensemble import STRATEGIES, Ensemble, Member
from maxlite.ensemble.member_program import build_programs

# Relative to the largest value of an array; measured: 4e-7 at most.
TOLERANCE = 1e-6
# Of initial values, by strategy. As tests are compiled, a product and a sum may be rounded once in
# one program and twice in another.
START_TOLERANCE = {"padded": 2e-7}


def why_not(family: str, strategy: str, num_devices: int) -> str:
  """What a strategy says that cannot serve."""
  if strategy == "processes":
    return "objects; use Ensemble.from_factory"
  if strategy == "switched" and num_devices == 1:
    return "a device per member"
  if strategy == "stacked" and family == "sizes":
    return r"shape: \(4,\) in m0, \(6,\) in m1"
  if strategy in ("stacked", "padded") and family == "structures":
    return "operations: .* in m0, .* in deep"
  return ""


# Members that are not spread over a mesh are fused on the first device, whatever else there is.
ON = [(strategy, n) for strategy in STRATEGIES for n in (1, 8) if (strategy, n) != ("fused", 8)]


# What runs through the same code as another of its family.
SLOW = {
  ("numbers", "switched", 8),
  ("numbers", "submesh", 1),
  ("sizes", "fused", 1),
  ("sizes", "submesh", 1),
  ("structures", "submesh", 1),
}
CASES = [
  pytest.param(family, *on, marks=[pytest.mark.slow] if (family, *on) in SLOW else [])
  for family in FAMILIES
  for on in ON
]


@pytest.mark.parametrize(("family", "strategy", "num_devices"), CASES)
def test_members_get_what_they_would_get_alone(family, strategy, num_devices):
  if message := why_not(family, strategy, num_devices):
    with pytest.raises(ValueError, match=message) as error:
      together(family, strategy, num_devices)
    assert "\n" not in str(error.value)
    return
  got, want = together(family, strategy, num_devices), alone(family)
  assert largest_error(got.start, want.start) <= START_TOLERANCE.get(strategy, 0)
  assert largest_error(got.losses_SZ, want.losses_SZ) <= TOLERANCE
  assert largest_error(got.end, want.end) <= TOLERANCE
  assert largest_error(got.predictions, want.predictions) <= TOLERANCE


@functools.cache
def own_programs() -> list:
  """Of the members of different structure, (losses, last state) of each one's compiled step."""
  ensemble = Ensemble(FAMILIES["structures"], loss, predict=predict)
  programs = build_programs(ensemble.members, loss, predict, batch(0))
  with jax.numpy_dtype_promotion("standard"):
    return [_run(program) for program in programs]


def _run(program):
  state, step, losses = jax.jit(program.init)(np.uint32(program.seed)), jax.jit(program.step), []
  for n in range(STEPS):
    state, metrics = step(state, batch(n))
    losses.append(np.asarray(metrics["loss"]))
  return np.stack(losses), state


@pytest.mark.parametrize(("strategy", "num_devices"), [("fused", 1), ("submesh", 8)])
def test_a_member_that_keeps_its_program_gets_the_same_bits(strategy, num_devices):
  got = together("structures", strategy, num_devices)
  for z, (losses, state) in enumerate(own_programs()):
    np.testing.assert_array_equal(got.losses_SZ[:, z], losses)
    assert largest_error(got.end[z], state.variables) == 0


@pytest.mark.parametrize(("source", "target"), [("padded", "submesh"), ("switched", "padded")])
def test_a_state_goes_from_one_strategy_to_another(source, target):
  giver, taker = together("sizes", source, 8), together("sizes", target, 8)
  given = giver.ensemble.member_states(giver.state)
  with jax.numpy_dtype_promotion("standard"):
    taken = taker.ensemble.load_states(given)
    back = taker.ensemble.member_states(taken)
    assert largest_error(back, given) == 0
    _, metrics = taker.ensemble.step(taken, batch(STEPS))
    _, expected = giver.ensemble.step(giver.ensemble.load_states(back), batch(STEPS))
  assert largest_error(metrics, expected) <= TOLERANCE


@pytest.mark.parametrize(
  ("family", "strategy"), [("numbers", "stacked"), ("structures", "submesh")]
)
def test_own_batches(family, strategy):
  members = FAMILIES[family][:2]
  ensemble = Ensemble(members, loss, predict=predict, strategy=strategy, own_batches=True)
  stack = lambda n: jax.tree.map(lambda *rows: np.stack(rows), *(batch(n + 5 * z) for z in (0, 1)))
  losses = []
  with jax.numpy_dtype_promotion("standard"):
    state = ensemble.init(stack(0))
    for n in range(STEPS):
      state, metrics = ensemble.step(state, stack(n))
      losses.append(np.asarray(metrics["loss"]))
  want = [train_alone(member, first=5 * z)[0] for z, member in enumerate(members)]
  assert largest_error(np.stack(losses, axis=1), np.stack(want)) <= TOLERANCE


def test_dropout_of_differing_sizes_is_refused():
  """Bits are drawn by the array's own size: those of a padded one would be others."""

  class Dropped(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x_BTD):
      x_BD = nn.Dense(self.width)(x_BTD[:, 0])
      return nn.Dense(1)(nn.Dropout(0.5, deterministic=False)(x_BD))

  members = [Member(Dropped(width), optax.sgd(1e-2)) for width in (2, 3)]
  with pytest.raises(ValueError, match=r"strategy padded cannot serve.*random_bits") as error:
    Ensemble(members, loss, strategy="padded").init(batch(0))
  assert "\n" not in str(error.value)
