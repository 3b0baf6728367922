"""With every strategy, each member equals the member trained alone."""

import functools
import platform
import re
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
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
from support import trees
from support.slow_cases import slow

from maxlite.ensemble import Ensemble, Member
from maxlite.ensemble.engines.engine_base import EngineRequest
from maxlite.ensemble.members.model_programs import build_programs
from maxlite.ensemble.members.program import abstract_tree, variables_of
from maxlite.kernels.xla_cpu import jit_init
from maxlite.registry import ENSEMBLE_STRATEGIES

# Relative to the largest value of an array; measured: 4e-7 at most.
TOLERANCE = 1e-6
# Of initial values. Without fused multiply-add, which conftest.py disables on x86, they are equal.
START_TOLERANCE = 2e-7
if platform.machine() == "x86_64":
  START_TOLERANCE = 0


def why_not(family: str, strategy: str, num_devices: int) -> str:
  """The message of a strategy that does not support the members."""
  if strategy == "processes":
    return "objects; use Ensemble.from_factory"
  if strategy == "switched" and num_devices == 1:
    return "a device per member"
  if strategy == "stacked" and family == "sizes":
    return "width is 4 in m0, and 6 in m1"
  if strategy == "stacked" and family == "structures":
    return r"widths is \(5,\) in m0, and \(3, 4\) in deep"
  if strategy == "padded" and family != "hyperparameters":
    return "padding takes members with the same parameters and optimizer function"
  return ""


# Cases that run the same code as another case of the family or strategy.
SLOW = {
  ("hyperparameters", "stacked", 1),
  ("hyperparameters", "fused", 1),
  ("hyperparameters", "padded", 1),
  ("hyperparameters", "submesh", 1),
  ("hyperparameters", "submesh", 8),
  ("hyperparameters", "switched", 8),
  ("numbers", "stacked", 1),
  ("numbers", "fused", 1),
  ("numbers", "submesh", 8),
  ("numbers", "switched", 8),
  ("numbers", "submesh", 1),
  ("numbers", "stacked", 8),
  ("sizes", "fused", 1),
  ("sizes", "submesh", 1),
  ("sizes", "submesh", 8),
  ("sizes", "switched", 8),
  ("structures", "submesh", 1),
  ("structures", "submesh", 8),
}
REFUSED = []
CASES = []
for family in FAMILIES:
  for strategy in ENSEMBLE_STRATEGIES:
    for num_devices in (1, 8):
      if num_devices == 8 and strategy in ("fused", "padded"):
        continue  # members that are not sharded over a mesh are on the first device
      case = (family, strategy, num_devices)
      if why_not(family, strategy, num_devices):
        REFUSED.append(case)
      elif case in SLOW:
        CASES.append(slow(family, strategy, num_devices))
      else:
        CASES.append(case)


@pytest.fixture(scope="module")
def train_together():
  """`together`, which trains members once."""
  return functools.cache(together)


@pytest.mark.parametrize(("family", "strategy", "num_devices"), REFUSED)
def test_members_that_a_strategy_does_not_support_are_refused(family, strategy, num_devices):
  with pytest.raises(ValueError, match=why_not(family, strategy, num_devices)) as error:
    together(family, strategy, num_devices)
  assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def train_alone_once():
  """`alone`, which trains the members of a family once."""
  return functools.cache(alone)


@pytest.mark.smoke
@pytest.mark.parametrize(("family", "strategy", "num_devices"), CASES)
def test_members_equal_members_trained_alone(
  train_together, train_alone_once, family, strategy, num_devices
):
  got = train_together(family, strategy, num_devices)
  want = train_alone_once(family)
  assert largest_error(got.start, want.start) <= START_TOLERANCE
  assert largest_error(got.losses_SZ, want.losses_SZ) <= TOLERANCE
  assert largest_error(got.end, want.end) <= TOLERANCE
  assert largest_error(got.predictions, want.predictions) <= TOLERANCE


@pytest.fixture(scope="module")
def own_programs() -> list:
  """(losses, last state) of each member of different structure, with its own compiled step."""
  ensemble = Ensemble(FAMILIES["structures"], loss, predict=predict)
  programs = build_programs(ensemble.members, loss, predict, batch(0))
  with jax.numpy_dtype_promotion("standard"):
    return [_run(program) for program in programs]


def _run(program):
  state = jit_init(program.functions.init)(np.uint32(program.seed))
  step = jax.jit(program.functions.step)
  losses = []
  for n in range(STEPS):
    state, metrics = step(state, batch(n))
    losses.append(np.asarray(metrics["loss"]))
  return np.stack(losses), state


@pytest.mark.parametrize(("strategy", "num_devices"), [("fused", 1), slow("submesh", 8)])
def test_members_that_are_not_stacked_are_bitwise_equal(
  train_together, own_programs, strategy, num_devices
):
  got = train_together("structures", strategy, num_devices)
  for z, (losses, state) in enumerate(own_programs):
    np.testing.assert_array_equal(got.losses_SZ[:, z], losses)
    assert largest_error(got.end[z], variables_of(state)) == 0


def test_members_on_several_devices_communicate_once_per_metric(train_together):
  """Not once per member."""
  trained = train_together("hyperparameters", "stacked", 8)
  programs = build_programs(trained.ensemble.members, loss, predict, batch(0))
  request = EngineRequest(
    num_members=len(programs),
    program=lambda z, _: programs[z],
    batch=abstract_tree(batch(0)),
    devices=jax.devices(),
  )
  engine = ENSEMBLE_STRATEGIES["stacked"](request)
  with jax.numpy_dtype_promotion("standard"):
    step = engine.jitted_step.lower(trained.state, batch(0))
  kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
  found = re.findall(rf" (?:{kinds})(?:-start)?\(", step.compile().as_text())
  assert 0 < len(found) <= len(step.out_info[1].common)


@pytest.mark.parametrize(
  ("from_strategy", "to_strategy"), [slow("fused", "submesh"), ("switched", "fused")]
)
def test_states_move_between_strategies(train_together, from_strategy, to_strategy):
  num_devices = {"fused": 1, "switched": 8, "submesh": 8}
  source = train_together("structures", from_strategy, num_devices[from_strategy])
  target = train_together("structures", to_strategy, num_devices[to_strategy])
  given = source.ensemble.member_states(source.state)
  with jax.numpy_dtype_promotion("standard"):
    taken = target.ensemble.load_states(given)
    back = target.ensemble.member_states(taken)
    assert largest_error(back, given) == 0
    _, metrics = target.ensemble.step(taken, batch(STEPS))
    _, expected = source.ensemble.step(source.ensemble.load_states(back), batch(STEPS))
  assert largest_error(metrics, expected) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
  ("family", "strategy"), [("numbers", "stacked"), ("structures", "submesh")]
)
def test_own_batches(family, strategy):
  members = FAMILIES[family][:2]
  ensemble = Ensemble(members, loss, predict=predict, strategy=strategy, own_batches=True)

  def stack(n):
    return trees.stack([batch(n), batch(n + 5)])

  losses = []
  with jax.numpy_dtype_promotion("standard"):
    state = ensemble.init(stack(0))
    for n in range(STEPS):
      state, metrics = ensemble.step(state, stack(n))
      losses.append(np.asarray(metrics["loss"]))
  first = train_alone(members[0], first=0)
  second = train_alone(members[1], first=5)
  want_ZS = np.stack([first.losses_S, second.losses_S])
  assert largest_error(np.stack(losses, axis=1), want_ZS) <= TOLERANCE


class Slots(nn.Module):
  """A table that is indexed by as many numbers as `size`."""

  size: int

  @nn.compact
  def __call__(self, x_BTD, train=True):
    del train
    slots_ND = nn.Embed(9, 4)(jnp.arange(self.size))
    x_BD = nn.Dense(4)(x_BTD[:, 0])
    return nn.Dense(1)(x_BD + slots_ND.sum(0, keepdims=True))


class Segments(nn.Module):
  """Sums over groups of units."""

  size: int

  @nn.compact
  def __call__(self, x_BTD, train=True):
    del train
    x_BD = nn.Dense(self.size)(x_BTD[:, 0])
    sums_GB = jax.ops.segment_sum(x_BD.T, jnp.arange(self.size) % 2, 2)
    return nn.Dense(1)(sums_GB.T)


@pytest.mark.slow
@pytest.mark.parametrize("module", [Slots, Segments])
def test_members_that_index_by_different_sizes(module):
  members = [Member(module(size), optax.adam(1e-2), seed=size) for size in (3, 5)]
  ensemble = Ensemble(members, loss, devices=jax.devices()[:1])
  losses = []
  state = ensemble.init(batch(0))
  assert ensemble.plan.strategy == "fused"
  with jax.numpy_dtype_promotion("standard"):
    for n in range(STEPS):
      state, metrics = ensemble.step(state, batch(n))
      losses.append(np.asarray(metrics["loss"]))
  want_ZS = np.stack([train_alone(member).losses_S for member in members])
  assert largest_error(np.stack(losses, axis=1), want_ZS) <= TOLERANCE


class Drawn(nn.Module):
  """A layer whose initial values are from one of two distributions."""

  kernel_init: Callable

  @nn.compact
  def __call__(self, x_BTD, train=True):
    del train
    return nn.Dense(1, kernel_init=self.kernel_init)(x_BTD[:, 0])


@pytest.mark.slow
def test_interleaved_groups_keep_the_order_of_the_members():
  normal = nn.initializers.normal()
  uniform = nn.initializers.uniform()
  inits = (normal, uniform, uniform, normal, uniform)
  members = [Member(Drawn(init), optax.sgd(0.1), seed=z) for z, init in enumerate(inits)]
  ensemble = Ensemble(members, loss, predict=predict, strategy="fused", devices=jax.devices()[:1])
  state = ensemble.init(batch(0))
  want = [train_alone(member) for member in members]
  starts = [own.params for own in ensemble.member_states(state).values()]
  want_starts = [result.start["params"] for result in want]
  assert largest_error(starts, want_starts) <= START_TOLERANCE
  losses = []
  for n in range(STEPS):
    state, metrics = ensemble.step(state, batch(n))
    losses.append(np.asarray(metrics["loss"]))
  want_ZS = np.stack([result.losses_S for result in want])
  assert largest_error(np.stack(losses, axis=1), want_ZS) <= TOLERANCE
  inputs_BTD, _ = batch(0)
  predictions = np.asarray(ensemble.predict(state, inputs_BTD).members)
  want_predictions = np.stack([result.prediction for result in want])
  assert largest_error(predictions, want_predictions) <= TOLERANCE
