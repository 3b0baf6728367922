"""Drawn modules, optimizers and seeds: every strategy against a plain Flax and Optax loop."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import largest_error
from fuzz_operations import ACTIVATIONS, OPERATIONS

from maxlite.ensemble import Ensemble, Member
from maxlite.errors import UserError

STEPS = 3
STRATEGIES = ("auto", "fused", "stacked", "submesh", "switched")
MAY_REFUSE = ("stacked", "switched")
CHANGES = (
  *("same", "ragged", "tuple", "operation", "scale"),
  *("options", "act", "offset", "dtype"),
)
NUM_SLOW_DRAWS = 2000
SLOW_BLOCK = 20
TOLERANCE = 2e-5  # of losses, relative to the largest
BATCHES = np.random.default_rng(0).normal(size=(STEPS, 4, 3)).astype(np.float32)


def uniform(key, shape, dtype=jnp.float32):
  """An initializer that compiles faster than Flax's default."""
  return jax.random.uniform(key, shape, dtype, -1, 1)


def sines(key, shape, dtype=jnp.float32):
  """Another one, which draws no random bits."""
  seed = jax.random.key_data(key).astype(dtype).sum() / 2.0**32
  return jnp.sin(100 * seed + 7 * jnp.arange(math.prod(shape), dtype=dtype)).reshape(shape)


class Drawn(nn.Module):
  """A dense layer and an operation in alternation, with fields of every kind."""

  operations: list[str]
  widths: list[int] | tuple[int, ...]
  scale: Any
  options: dict[str, Any]
  act: Callable
  offset: float = dataclasses.field(default=0.0, compare=False)
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, x_BD):
    for name, width in zip(self.operations, self.widths, strict=True):
      x_BD = nn.Dense(width, dtype=self.dtype, kernel_init=sines)(x_BD).astype(jnp.float32)
      x_BD = OPERATIONS[name](self, x_BD) * self.options["gain"] + self.offset
    x_BD = self.act(x_BD)
    if isinstance(self.scale, bool):
      x_BD = x_BD + 1
    x_BD = x_BD * self.scale if isinstance(self.scale, float) else x_BD / self.scale
    return nn.Dense(1, kernel_init=uniform)(x_BD)


def draw_optimizer(rng: np.random.Generator) -> optax.GradientTransformation:
  rate = float(rng.choice([0.1, 0.03, 0.01]))
  schedule = optax.cosine_decay_schedule(rate, int(rng.integers(2, 6)))
  closed_over = np.float32(rng.uniform(0.5, 1.5))

  def scale(updates, _):
    return jax.tree.map(lambda u: u * closed_over, updates)

  makers = [
    lambda: optax.sgd(rate),
    lambda: optax.sgd(schedule, momentum=0.9, nesterov=True),
    lambda: optax.adam(rate, eps=1e-3),
    lambda: optax.adamw(schedule, eps=1e-3, weight_decay=float(rng.choice([0.01, 0.1]))),
    lambda: optax.inject_hyperparams(optax.adam)(learning_rate=rate, eps=1e-3),
    lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=schedule),
    lambda: optax.chain(optax.clip_by_global_norm(rate), optax.sgd(1.0)),
    lambda: optax.chain(optax.stateless(scale), optax.rmsprop(rate, eps=1e-3)),
    lambda: optax.adagrad(rate, eps=1e-3),
  ]
  return makers[rng.integers(len(makers))]()


def draw_members(rng: np.random.Generator, most: int, change: str = "") -> list[Member]:
  """At least two members that differ in little.

  Args:
    rng: draws the members.
    most: the largest number of operations, and of members after the first.
    change: the field in which they differ from the first member; drawn for each if it is empty.
  """
  depth = int(rng.integers(1, most + 1))
  fields = {
    "operations": rng.choice(sorted(OPERATIONS), depth).tolist(),
    "widths": rng.integers(2, 6, depth).tolist(),
    "scale": 1.0,
    "options": {"gain": 0.5, "unused": [1]},
    "act": ACTIVATIONS[rng.integers(len(ACTIVATIONS))],
  }
  changes = {
    "same": lambda: {},
    "ragged": lambda: {"widths": rng.integers(2, 6, depth).tolist()},
    "tuple": lambda: {"widths": tuple(fields["widths"])},
    "operation": lambda: {"operations": rng.choice(sorted(OPERATIONS), depth).tolist()},
    "scale": lambda: {"scale": [1, 2, 2.0, True][rng.integers(4)]},
    "options": lambda: {"options": {"gain": [0.25, 2, 2.0][rng.integers(3)]}},
    "act": lambda: {"act": ACTIVATIONS[rng.integers(len(ACTIVATIONS))]},
    "offset": lambda: {"offset": float(rng.normal())},
    "dtype": lambda: {"dtype": jnp.bfloat16},
  }
  weights = {"same": 3, "ragged": 4}
  chance = np.array([weights.get(name, 1) for name in CHANGES], float)
  first = draw_optimizer(rng)
  members = [Member(Drawn(**fields), first, seed=int(rng.integers(-5, 2**40)))]
  for _ in range(rng.integers(1, most + 1)):
    own_change = change or rng.choice(CHANGES, p=chance / chance.sum())
    own_fields = fields | changes[own_change]()
    optimizer = first
    if rng.random() >= 0.3:
      optimizer = draw_optimizer(rng)
    seed = int(rng.integers(-5, 2**40))
    members.append(Member(Drawn(**own_fields), optimizer, seed=seed))
  return members


def loss(model, x_BD):
  return jnp.mean((model(x_BD) - jnp.sin(x_BD.sum(1, keepdims=True))) ** 2)


def solo_run(member: Member) -> tuple[Any, jax.Array]:
  """(initial parameters, loss of each step) of the loop that a user would write."""
  key = jax.random.key(member.seed)
  variables = nn.init(loss, member.model)(key, BATCHES[0])
  params = variables["params"]
  rest = {name: tree for name, tree in variables.items() if name != "params"}

  def step(carry, inputs):
    params, rest, opt_state = carry
    n, batch = inputs
    rngs = {"params": jax.random.fold_in(jax.random.fold_in(key, 1), n)}
    run = nn.apply(loss, member.model, mutable=list(rest))

    def compute(params):
      return run({"params": params, **rest}, batch, rngs=rngs)

    (value, rest), gradients = jax.value_and_grad(compute, has_aux=True)(params)
    updates, opt_state = member.optimizer.update(gradients, opt_state, params)
    return (optax.apply_updates(params, updates), rest, opt_state), value

  start = (params, dict(rest), member.optimizer.init(params))
  _, losses_S = jax.lax.scan(step, start, (jnp.arange(STEPS), BATCHES))
  return params, losses_S


def check(number: int, strategies: tuple[str, ...], most: int, change: str = "") -> None:
  """Train the members of a draw with these strategies."""
  members = draw_members(np.random.default_rng(number), most, change)
  solo = jax.jit(lambda: [solo_run(member) for member in members])
  for strategy in strategies:
    devices = jax.devices()[: len(members)]
    if strategy == "auto":
      devices = jax.devices()[:1]
    ensemble = Ensemble(members, loss, strategy=strategy, devices=devices)
    where = f"draw {number}, {strategy}: {members}"
    try:
      state = ensemble.init(BATCHES[0])
    except UserError:
      assert strategy in MAY_REFUSE, where
      continue
    expected = solo()
    for own, (start, _) in zip(ensemble.member_states(state).values(), expected, strict=True):
      assert largest_error(own.params, start) <= 1e-6, where
    expected_ZS = np.stack([losses_S for _, losses_S in expected])
    assert np.isfinite(expected_ZS).all(), where
    for n, batch in enumerate(BATCHES):
      state, metrics = ensemble.step(state, batch)
      error = largest_error(np.asarray(metrics["loss"]), expected_ZS[:, n])
      assert error <= TOLERANCE, f"step {n} of {where}"


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_drawn_members_equal_plain_loops(change):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    check(CHANGES.index(change), STRATEGIES, most=1, change=change)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, NUM_SLOW_DRAWS, SLOW_BLOCK))
def test_many_drawn_members_equal_plain_loops(first):
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    for number in range(first, first + SLOW_BLOCK):
      # Two neighbours of the cycle of strategies, so that each strategy gets 800 of 2,000 draws.
      start = number % len(STRATEGIES)
      check(number, (STRATEGIES * 2)[start : start + 2], most=2)


def test_enough_operations_are_drawn():
  assert len(OPERATIONS) >= 60
