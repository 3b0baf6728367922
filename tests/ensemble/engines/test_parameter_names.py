"""Parameters whose names contain `/`, and parameters that are trees, in every strategy."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import largest_error
from support.slow_cases import slow

from maxlite.ensemble import Ensemble, Member, lift
from maxlite.errors import UserError

RATES = (0.1, 0.03)
BATCH = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)


class Named(nn.Module):
  """`WeightNorm_0/Dense_0/kernel/scale` has four names or two; `pair` is a tuple of trees."""

  @nn.compact
  def __call__(self, x_BD):
    x_BD = nn.WeightNorm(nn.Dense(3))(x_BD)
    x_BD = nn.SpectralNorm(nn.Dense(3))(x_BD, update_stats=True)

    def init_pair(key):
      return jax.random.normal(key, (3,)), {"b/c": jnp.zeros(3)}

    gain_D, offset = self.param("pair", init_pair)
    return x_BD * gain_D[None] + offset["b/c"][None]


def loss(model, x_BD):
  return jnp.mean((model(x_BD) - 1) ** 2)


TRAIN = [".*/Dense_0/kernel/scale", "pair/1/.*", "Dense_1/.*"]


def is_trained(path: tuple[str, ...]) -> bool:
  return path[-1] in ("Dense_0/kernel/scale", "b/c") or path[0] == "Dense_1"


def solo_params(rate: float, seed: int, train: list[str] | None, num_steps: int):
  """The parameters after the loop that a user would write."""
  init = nn.init(loss, Named())
  variables = init(jax.random.key(seed), BATCH)
  params, collections = variables["params"], {"batch_stats": variables["batch_stats"]}

  def compute(params):
    run = nn.apply(loss, Named(), mutable=["batch_stats"])
    return run({"params": params, **collections}, BATCH)

  def update(path, leaf, gradient):
    names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    return leaf - rate * gradient if train is None or is_trained(names) else leaf

  for _ in range(num_steps):
    gradients, collections = jax.grad(compute, has_aux=True)(params)
    params = jax.tree.map_with_path(update, params, gradients)
  return params


@pytest.mark.parametrize(
  "train", [pytest.param(None, id="all", marks=pytest.mark.slow), pytest.param(TRAIN, id="some")]
)
@pytest.mark.parametrize(
  "strategy", ["stacked", slow("fused"), slow("submesh"), slow("switched"), slow("padded")]
)
def test_members_equal_their_solo_runs(strategy, train):
  members = [
    Member(Named(), optax.sgd, hyperparameters={"learning_rate": rate}, train=train)
    for rate in RATES
  ]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:2])
  state = ensemble.init(BATCH)
  state, _ = ensemble.step(state, BATCH)
  again = ensemble.load_states(ensemble.member_states(state))
  again, _ = ensemble.step(again, BATCH)
  for name, rate in zip(ensemble.names, RATES, strict=True):
    got = ensemble.member_params(again, name)["params"]
    assert largest_error(got, solo_params(rate, 0, train, 2)) <= 1e-6


def test_a_base_may_have_such_parameters():
  """A base has lists where it was restored from a checkpoint, and must have what is frozen."""
  base = Named().init(jax.random.key(9), BATCH)["params"]
  as_restored = base | {"pair": list(base["pair"])}
  members = [Member(Named(), optax.sgd(0.1), seed=z, train=TRAIN) for z in range(2)]
  ensemble = Ensemble(members, loss, strategy="stacked", base=as_restored)
  state = ensemble.init(BATCH)
  for name in ensemble.names:
    params = ensemble.member_params(state, name)["params"]
    jax.tree.map(np.testing.assert_array_equal, params, base)
  (group,) = state
  assert len(jax.tree.leaves(group.shared)) == 3  # of 7, which are held once
  with pytest.raises(UserError, match="base lacks pair/0, which is frozen"):
    Ensemble(members, loss, base={"Dense_0": base["Dense_0"]}).init(BATCH)
  wrong = base | {"pair": (np.ones(4), base["pair"][1])}
  with pytest.raises(UserError, match=r"pair/0 of base has shape \(4,\)"):
    Ensemble(members, loss, base=wrong).init(BATCH)


def test_lifted_trees_have_the_axis_of_members():
  variables = jax.eval_shape(lift(Named(), 3).init, jax.random.key(0), BATCH)
  names = nn.get_partition_spec(variables)["params"]
  assert names["pair"] == (jax.P("ensemble", None), {"b/c": jax.P("ensemble", None)})
  assert names["WeightNorm_0"] == {"Dense_0/kernel/scale": jax.P("ensemble", None)}
