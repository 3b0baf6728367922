"""Members whose modules or programs compare equal without being the same."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import batch, largest_error, loss, train_alone
from support.slow_cases import fast_only, slow

from maxlite.ensemble import Ensemble, Member
from maxlite.errors import UserError
from maxlite.libraries.identity import identity


class Fields(nn.Module):
  """A dense layer and a function of fields of every kind."""

  scale: Any = 1.0
  features: list[int] | tuple[int, ...] = (3,)
  options: dict[str, Any] | None = None
  act: Callable = nn.tanh
  offset: float = dataclasses.field(default=0.0, compare=False)
  key: Any = None
  layers: tuple[nn.Module, ...] = ()

  @nn.compact
  def __call__(self, x_BTD, train=True):
    del train
    x_BD = x_BTD[:, 0]
    for width in self.features:
      x_BD = self.act(nn.Dense(width)(x_BD))
    for layer in self.layers:
      x_BD = layer(x_BD)
    x_BD = x_BD / self.scale + self.offset
    if isinstance(self.scale, int):
      x_BD = -x_BD
    if self.options:
      x_BD = x_BD * self.options["gain"] + (next(iter(self.options)) == "gain")
    if self.key is not None:
      x_BD = x_BD + jax.random.normal(self.key, (1, x_BD.shape[1]))
    return nn.Dense(1)(x_BD)


DENSE = nn.Dense(3)
PAIRS = {
  "int and float": ({"scale": 1}, {"scale": 1.0}),
  "bool and int": ({"scale": True}, {"scale": 1}),
  "zeros of both signs": ({"scale": np.inf, "offset": 0.0}, {"scale": np.inf, "offset": -0.0}),
  "a field without comparison": ({"offset": 0.5}, {"offset": -0.5}),
  "list and tuple": ({"features": [4, 3]}, {"features": (4, 3)}),
  "lists of other sizes": ({"features": [4, 3]}, {"features": [3, 4]}),
  "dicts of other order": ({"options": {"gain": 2.0, "b": 1}}, {"options": {"b": 1, "gain": 2.0}}),
  "functions": ({"act": nn.relu}, {"act": nn.gelu}),
  "random keys": ({"key": jax.random.key(1)}, {"key": jax.random.key(2)}),
  "equal modules": ({"features": [3]}, {"features": [3]}),
  "shared modules": ({"layers": (DENSE, DENSE)}, {"layers": (nn.Dense(3), nn.Dense(3))}),
}
FAST_PAIRS = ("zeros of both signs", "a field without comparison")


@pytest.mark.smoke
@pytest.mark.parametrize("pair", fast_only(PAIRS, *FAST_PAIRS))
def test_members_with_different_fields_equal_solo_runs(pair):
  optimizer = optax.sgd(0.1)
  members = [Member(Fields(**fields), optimizer, seed=3) for fields in PAIRS[pair]]
  ensemble = Ensemble(members, loss, strategy="fused", devices=jax.devices()[:1])
  with jax.numpy_dtype_promotion("standard"):
    _, metrics = ensemble.step(ensemble.init(batch(0)), batch(0))
    want = [first_loss(member) for member in members]
  assert largest_error(np.asarray(metrics["loss"]), np.stack(want)) <= 1e-6


@pytest.mark.parametrize(
  ("left", "right"), [(0.0, -0.0), (1, 1.0), (1, True), ((1,), [1]), ({"a": 1}, {"a": 1.0})]
)
def test_values_that_compare_equal_have_different_identities(left, right):
  assert left == right or isinstance(left, tuple)
  assert identity(left) != identity(right)


def scaled(factor, offset=0):
  return lambda x: factor * x + offset


def test_functions_are_the_same_by_their_code_and_what_they_close_over():
  assert identity(scaled(2)) == identity(scaled(2))
  assert identity(scaled(2)) != identity(scaled(2.0))
  assert identity(scaled(2)) != identity(scaled(2, 1))
  assert identity(lambda x: x) != identity(lambda x: x)  # from two places
  array = jnp.ones(2)
  assert identity(scaled(array)) == identity(scaled(array))
  assert identity(scaled(array)) != identity(scaled(jnp.ones(2)))
  defaults = [lambda x, n=n: x + n for n in (1, 1, 2)]
  assert identity(defaults[0]) == identity(defaults[1]) != identity(defaults[2])
  keywords = [lambda x, *, n=n: x + n for n in (1, 1, 2)]
  assert identity(keywords[0]) == identity(keywords[1]) != identity(keywords[2])
  partials = [functools.partial(scaled, n) for n in (1, 1, True)]
  assert identity(partials[0]) == identity(partials[1]) != identity(partials[2])


def first_loss(member):
  variables = member.model.init(jax.random.key(member.seed), batch(0)[0])
  return np.asarray(nn.apply(loss, member.model)(variables, batch(0))[0])


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_random_numbers_of_members_do_not_depend_on_the_generator(impl):
  """Under `vmap`, these generators would draw all members' numbers from the first one's key."""

  class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x_BTD, train=True):
      x_BD = nn.Dropout(0.5, deterministic=not train)(nn.Dense(8)(x_BTD[:, 0]))
      return nn.Dense(1)(x_BD)

  with jax.default_prng_impl(impl), jax.numpy_dtype_promotion("standard"):
    members = [Member(Noisy(), optax.sgd(rate), seed=z) for z, rate in enumerate((0.1, 0.2))]
    ensemble = Ensemble(members, loss, strategy="fused", devices=jax.devices()[:1])
    state = ensemble.init(batch(0))
    want = [train_alone(member) for member in members]
    starts = [own.params for own in ensemble.member_states(state).values()]
    want_starts = [result.start["params"] for result in want]
    assert largest_error(starts, want_starts) == 0
    want_ZS = np.stack([result.losses_S for result in want])
    for n in range(2):
      state, metrics = ensemble.step(state, batch(n))
      assert largest_error(np.asarray(metrics["loss"]), want_ZS[:, n]) <= 1e-6
    stacked = Ensemble(members, loss, strategy="stacked", devices=jax.devices()[:1])
    with pytest.raises(UserError, match=f"jax_default_prng_impl={impl} draws .*; use fused"):
      stacked.init(batch(0))


@pytest.mark.parametrize("strategy", ["stacked", slow("switched"), slow("submesh")])
def test_any_integer_is_a_seed(strategy):
  seeds = (-1, 2**40 + 5, np.int64(2**32 - 2))
  members = [Member(Fields(), optax.sgd(0.1), seed=seed) for seed in seeds]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:3])
  state = ensemble.init(batch(0))
  for member, own in zip(members, ensemble.member_states(state).values(), strict=True):
    want = member.model.init(jax.random.key(int(member.seed)), batch(0)[0])
    assert largest_error(own.params, want["params"]) == 0


class Sowing(nn.Module):
  """A module whose loss has a term that it sows, and with statistics, to which it sows as well."""

  @nn.compact
  def __call__(self, x_BTD, train=True):
    x_BD = nn.BatchNorm(use_running_average=not train)(nn.Dense(3)(x_BTD[:, 0]))
    self.sow("batch_stats", "seen", x_BD)
    self.sow("losses", "size", jnp.mean(x_BD**2))
    self.sow("losses", "size", jnp.mean(jnp.abs(x_BD)))
    return nn.Dense(1)(x_BD)


def sown_loss(model, batch):
  error = jnp.mean((model(batch[0]) - batch[1]) ** 2)
  return error + sum(jax.tree.leaves(model.variables.get("losses", {})))


@pytest.mark.parametrize("strategy", ["stacked", slow("submesh")])
def test_sown_values_live_for_one_step(strategy):
  rates = (0.1, 0.01)
  members = [Member(Sowing(), optax.sgd(rate)) for rate in rates]
  ensemble = Ensemble(members, sown_loss, strategy=strategy, devices=jax.devices()[:1])
  state = ensemble.init(batch(0))
  losses = []
  for n in range(3):
    state, metrics = ensemble.step(state, batch(n))
    losses.append(np.asarray(metrics["loss"]))
  variables = ensemble.member_params(state, "m0")
  assert set(variables) == {"params", "batch_stats"}
  assert set(variables["batch_stats"]) == {"BatchNorm_0"}
  for z, rate in enumerate(rates):
    np.testing.assert_allclose(np.stack(losses)[:, z], sown_losses_of_solo_run(rate), rtol=1e-6)


def sown_losses_of_solo_run(rate):
  model = Sowing()
  losses = []
  variables = model.init(jax.random.key(0), batch(0)[0])
  params = variables["params"]
  stats = variables["batch_stats"]["BatchNorm_0"]

  def value(params, stats, inputs, targets):
    variables = {"params": params, "batch_stats": {"BatchNorm_0": stats}}
    y, new = model.apply(variables, inputs, mutable=["batch_stats", "losses"])
    penalty = sum(jax.tree.leaves(new["losses"]))
    return jnp.mean((y - targets) ** 2) + penalty, new["batch_stats"]["BatchNorm_0"]

  compute = jax.jit(jax.value_and_grad(value, has_aux=True))
  for n in range(3):
    inputs, targets = batch(n)
    (loss, stats), gradients = compute(params, stats, inputs, targets)
    params = jax.tree.map(lambda p, g: p - rate * g, params, gradients)
    losses.append(loss)
  return np.stack(losses)
