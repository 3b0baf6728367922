"""Collections such as running statistics move only with the module that their phase trains."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from alternation_cases import ROWS, draw
from support.slow_cases import slow

from maxlite.phases import Alternation, Phase
from maxlite.phases.module_collections import freeze_collections


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x_BD):
    x_BD = nn.Dense(4, name="dense")(x_BD)
    x_BD = nn.BatchNorm(use_running_average=False, name="norm")(x_BD)
    return nn.Dropout(0.5, deterministic=False)(x_BD)


class Two(nn.Module):
  def setup(self):
    self.a = Normed()
    self.b = Normed()

  def __call__(self, x_BD):
    return self.b(self.a(x_BD))


def test_collections_are_frozen_with_their_module_and_losses_get_keys():
  model = Two()

  def loss(params, batch, collections, key):
    run = functools.partial(model.apply, rngs={"dropout": key}, mutable=list(collections))
    y_BD, collections = run({"params": params, **collections}, batch)
    loss = jnp.mean((y_BD - 1) ** 2)
    return loss, {"drawn": jax.random.uniform(key)}, collections

  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
  variables = model.init(keys, draw((ROWS, 4), 0))
  params = variables["params"]
  statistics = {"batch_stats": variables["batch_stats"]}
  sgd = optax.sgd(0.1)
  phases = [
    Phase("a", ["a/norm/.*"], loss, sgd, steps=1),
    Phase("b", ["b/dense/.*"], loss, sgd, steps=1),
    Phase("c", ["b/.*"], loss, sgd, steps=1, accumulate=2),
  ]
  alternation = Alternation(phases)
  state = alternation.init(params, statistics)
  drawn = set()
  for step, moving in enumerate(("a", "", "b")):  # an untrained norm keeps its statistics
    before = jax.device_get(state.collections["batch_stats"])
    state, metrics = alternation.step(state, draw((ROWS, 4), step))
    after = jax.device_get(state.collections["batch_stats"])
    drawn.add(float(metrics["drawn"]))
    for name in "ab":
      old_D = before[name]["norm"]["mean"]
      new_D = after[name]["norm"]["mean"]
      assert np.array_equal(old_D, new_D) == (name != moving)
  assert len(drawn) == 3


def counts_of_flax(a, b):
  return {"stats": {"a": {"norm": {"count": a}}, "b": {"norm": {"count": b}}}}


def counts_by_model(a, b):
  return {"a": {"stats": {"norm": {"count": a}}}, "b": {"stats": {"norm": {"count": b}}}}


def counts_of_one_collection(a, b):
  return {"a": {"norm": {"count": a}}, "b": {"norm": {"count": b}}}


@pytest.mark.parametrize(
  ("layout", "has_all_variables"),
  [
    (counts_of_flax, False),
    slow(counts_by_model, False),
    slow(counts_of_one_collection, False),
    (counts_of_flax, True),
  ],
  ids=["flax", "collections of models", "one collection of models", "all variables"],
)
def test_collections_are_frozen_with_their_module_in_every_layout(layout, has_all_variables):
  def loss(params, batch, collections):
    size = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return size * batch, {}, jax.tree.map(lambda leaf: leaf + 1, collections)

  params = {"a": {"dense": jnp.ones(2)}, "b": {"dense": jnp.ones(2)}}
  prefix = ""
  if has_all_variables:
    params = {"params": params}
    prefix = "params/"
  phases = [
    Phase("a", [f"{prefix}a/.*"], loss, optax.sgd(0.1), steps=2),
    Phase("b", [f"{prefix}b/.*"], loss, optax.sgd(0.1), steps=1),
  ]
  alternation = Alternation(phases)
  state = alternation.init(params, layout(jnp.zeros(()), jnp.zeros(())))
  for _ in range(4):
    state, _ = alternation.step(state, jnp.ones(()))
  assert jax.device_get(state.collections) == layout(3.0, 1.0)


def test_collections_of_modules_are_found_by_whole_names():
  """`a/b` is one name, of a module beside `a`, and `ab` is not in `a`."""
  before = {"stats": {"a": {"b": {"x": 0}}, "a/b": {"x": 0}, "ab": {"x/y": 0}, "other": {"x": 0}}}
  after = jax.tree.map(lambda _: 1, before)
  labels = {"a": {"b": {"kernel": "frozen"}}, "a/b": {"kernel": "train"}}
  labels["ab"] = {"kernel": "frozen"}
  moved = freeze_collections(before, after, labels)["stats"]
  assert moved == {"a": {"b": {"x": 0}}, "a/b": {"x": 1}, "ab": {"x/y": 0}, "other": {"x": 1}}
