"""Phases of Equinox and NNX models: losses get the model, and phases equal a plain loop."""

import re
import runpy
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import trees
from support.slow_cases import slow
from support.tiny import compilations

from maxlite.errors import UserError
from maxlite.phases import Alternation, Phase

X_BD = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
BATCH = (X_BD, np.sin(X_BD[:, :1]))


@pytest.fixture(autouse=True)
def standard_promotion():
  with jax.numpy_dtype_promotion("standard"):
    yield


class Equinox(eqx.Module):
  """A feeds B and C."""

  a: eqx.nn.MLP
  b: eqx.nn.MLP
  c: eqx.nn.MLP

  def __init__(self, key):
    keys = jax.random.split(key, 3)
    self.a = eqx.nn.MLP(3, 4, 4, 1, key=keys[0])
    self.b = eqx.nn.MLP(4, 1, 4, 1, key=keys[1])
    self.c = eqx.nn.MLP(4, 1, 4, 1, key=keys[2])

  def __call__(self, x_BD):
    h_BD = jax.vmap(self.a)(x_BD)
    return jax.vmap(self.b)(h_BD), jax.vmap(self.c)(h_BD)


class Layer(nnx.Module):
  def __init__(self, num_in, num_out, rngs):
    self.dense = nnx.Linear(num_in, num_out, rngs=rngs)
    self.norm = nnx.BatchNorm(num_out, momentum=0.5, rngs=rngs)

  def __call__(self, x_BD):
    return self.norm(jnp.tanh(self.dense(x_BD)))


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.a = Layer(3, 4, rngs)
    self.b = Layer(4, 1, rngs)
    self.c = Layer(4, 1, rngs)

  def __call__(self, x_BD):
    h_BD = self.a(x_BD)
    return self.b(h_BD), self.c(h_BD)


def fit_loss(model, batch):
  b_BD, _ = model(batch[0])
  return jnp.mean((b_BD - batch[1]) ** 2)


def match_loss(model, batch):
  b_BD, c_BD = model(batch[0])
  return jnp.mean((c_BD - b_BD) ** 2), {"gap": jnp.max(jnp.abs(c_BD - b_BD))}


def phases():
  return [
    Phase("fit", ["a/.*", "b/.*"], fit_loss, optax.adam(1e-2), steps=2),
    Phase("match", ["c/.*"], match_loss, optax.sgd(0.1), steps=1),
  ]


def test_equinox_912_two_objectives_alternate_without_compiling_again():
  """https://github.com/patrick-kidger/equinox/issues/912, against the loop that it describes."""
  model = Equinox(jax.random.key(1))
  alternation = Alternation(phases(), initial_phases={"fit": 2})
  state = alternation.init(model)
  alternation.compile(state, BATCH)

  def is_of(*names):
    labels = jax.tree.map(lambda _: False, model)
    for name in names:
      part = jax.tree.map(eqx.is_inexact_array, getattr(model, name))
      labels = eqx.tree_at(lambda tree, name=name: getattr(tree, name), labels, part)
    return labels

  parts = {"fit": is_of("a", "b"), "match": is_of("c")}
  losses = {"fit": fit_loss, "match": lambda model, batch: match_loss(model, batch)[0]}
  optimizers = {phase.name: phase.optimizer for phase in phases()}
  opt_states = {name: optimizers[name].init(eqx.filter(model, parts[name])) for name in parts}

  @eqx.filter_jit
  def by_hand(name, model, opt_state):
    trained, frozen = eqx.partition(model, parts[name])

    @eqx.filter_value_and_grad
    def compute(trained):
      return losses[name](eqx.combine(trained, frozen), BATCH)

    value, gradients = compute(trained)
    updates, opt_state = optimizers[name].update(gradients, opt_state, trained)
    return eqx.combine(eqx.apply_updates(trained, updates), frozen), opt_state, value

  for name in ("fit", "fit", "fit", "fit", "match", "fit"):
    with compilations() as compiled:
      state, metrics = alternation.step(state, BATCH)
    assert not compiled
    assert alternation.names[int(metrics["phase"])] == name
    model, opt_states[name], want = by_hand(name, model, opt_states[name])
    np.testing.assert_allclose(metrics["loss"], want, rtol=2e-5)
  assert alternation.num_compiled == 2
  trained = alternation.model(state)
  assert isinstance(trained, Equinox)
  for got, wanted in trees.leaf_pairs(
    eqx.filter(trained, eqx.is_array), eqx.filter(model, eqx.is_array)
  ):
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_what_a_phase_does_not_train_keeps_its_bits_with_its_statistics():
  alternation = Alternation(phases(), ema_decay=0.5)
  state = alternation.init(Nnx, seed=3)
  assert alternation.untrained(Nnx) == []
  start = alternation.model(state)
  assert trees_equal(start, Nnx(nnx.Rngs(3)))
  for _ in range(2):
    state, _ = alternation.step(state, BATCH)
  fitted = alternation.model(state)
  assert trees_equal(fitted.c, start.c)
  assert not trees_equal(fitted.a, start.a)
  assert np.any(fitted.a.norm.mean[...] != 0)
  state, metrics = alternation.step(state, BATCH)
  matched = alternation.model(state)
  assert trees_equal(matched.a, fitted.a)
  assert np.any(matched.c.norm.mean[...] != fitted.c.norm.mean[...])
  assert set(metrics) >= {"loss", "gap"}
  averages = alternation.ema_params(state)
  assert isinstance(averages, Nnx)
  assert not trees_equal(averages.a, matched.a)


def trees_equal(left, right):
  pairs = zip(jax.tree.leaves(nnx.state(left)), jax.tree.leaves(nnx.state(right)), strict=True)
  return all(np.array_equal(a, b) for a, b in pairs)


class Normed(eqx.Module):
  linear: eqx.nn.Linear
  norm: eqx.nn.BatchNorm
  head: eqx.nn.Linear
  dropout: eqx.nn.Dropout

  def __init__(self, key):
    self.linear = eqx.nn.Linear(3, 4, key=key)
    self.norm = eqx.nn.BatchNorm(4, axis_name="batch", momentum=0.5, mode="batch")
    self.head = eqx.nn.Linear(4, 1, key=jax.random.fold_in(key, 1))
    self.dropout = eqx.nn.Dropout(0.5)

  def __call__(self, x_D, state, key):
    x_D, state = self.norm(self.linear(x_D), state)
    return self.head(self.dropout(x_D, key=key)), state


def stateful_loss(model, batch, key, state):
  keys_B = jax.random.split(key, len(batch[0]))
  run = jax.vmap(model, axis_name="batch", in_axes=(0, None, 0), out_axes=(0, None))
  y_BD, state = run(batch[0], state, keys_B)
  return jnp.mean((y_BD - batch[1]) ** 2), {}, state


@pytest.mark.slow
def test_equinox_state_changes_in_phases_that_train_its_layer():
  model_phases = [
    Phase("head", ["head/.*"], stateful_loss, optax.sgd(0.1), steps=1),
    Phase("norm", ["norm/.*", "linear/.*"], stateful_loss, optax.sgd(0.1), steps=1),
  ]
  alternation = Alternation(model_phases)
  make = eqx.nn.make_with_state(Normed)
  state = alternation.init(make(jax.random.key(0)))
  _, first = alternation.model(state)
  state, _ = alternation.step(state, BATCH)
  model, second = alternation.model(state)
  assert eqx.tree_equal(
    first.get(model.norm.batch_state_index), second.get(model.norm.batch_state_index)
  )
  state, _ = alternation.step(state, BATCH)
  model, third = alternation.model(state)
  assert not eqx.tree_equal(
    second.get(model.norm.batch_state_index), third.get(model.norm.batch_state_index)
  )


@pytest.mark.parametrize("library", ["nnx", slow("equinox")])
def test_an_update_returns_the_model(library):
  """A target network follows another part of the model."""

  def follow_nnx(model, batch):
    target, source = nnx.state(model.c, nnx.Param), nnx.state(model.b, nnx.Param)
    nnx.update(model.c, jax.tree.map(lambda c, b: c / 2 + b / 2, target, source))
    return model, {"size": jnp.sum(model.c.dense.kernel[...] ** 2)}

  def follow_equinox(model, batch):
    c = jax.tree.map(lambda c, b: c / 2 + b / 2 if eqx.is_inexact_array(c) else c, model.c, model.b)
    return eqx.tree_at(lambda model: model.c, model, c), {"size": jnp.sum(batch[0])}

  follow = {"nnx": follow_nnx, "equinox": follow_equinox}[library]
  model = Nnx(nnx.Rngs(0)) if library == "nnx" else Equinox(jax.random.key(0))
  alternation = Alternation([Phase("follow", ["c/.*"], update=follow, steps=1)])
  state, metrics = alternation.step(alternation.init(model), BATCH)
  after = alternation.model(state)
  if library == "nnx":
    want = (model.c.dense.kernel[...] + model.b.dense.kernel[...]) / 2
    np.testing.assert_allclose(after.c.dense.kernel[...], want, rtol=1e-6)
  else:
    want = (model.c.layers[0].weight + model.b.layers[0].weight) / 2
    np.testing.assert_allclose(after.c.layers[0].weight, want, rtol=1e-6)
  assert np.isfinite(metrics["size"])


@pytest.mark.slow
def test_a_model_is_saved_loaded_and_evaluated(tmp_path):
  alternation = Alternation(phases())
  state = alternation.init(Nnx)
  state, rows = alternation.fit(
    [BATCH] * 3,
    3,
    state=state,
    eval_loss=fit_loss,
    eval_batches=[BATCH],
    period=1,
    report=lambda line: None,
  )
  model = alternation.model(state)
  np.testing.assert_allclose(rows[-1]["eval_loss"], fit_loss(model, BATCH), rtol=1e-5)
  alternation.save(state, tmp_path / "state")
  again = Alternation(phases())
  loaded = again.load(tmp_path / "state", Nnx)
  state, metrics = alternation.step(state, BATCH)
  loaded, loaded_metrics = again.step(loaded, BATCH)
  np.testing.assert_array_equal(metrics["loss"], loaded_metrics["loss"])
  assert trees_equal(again.model(loaded), alternation.model(state))


@pytest.mark.slow
def test_the_lines_of_the_page_run(tmp_path):
  text = (Path(__file__).parents[2] / "docs" / "alternating.md").read_text("utf-8")
  section = text[text.index("### Models of Equinox") : text.index("### What stops training")]
  (block,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
  script = tmp_path / "example.py"
  script.write_text(block)
  names = {"Alternation": Alternation, "Phase": Phase, "Model": Equinox, "batch": BATCH}
  result = runpy.run_path(str(script), {**names, "optax": optax, "jax": jax, "jnp": jnp})
  assert isinstance(result["model"], Equinox)


@pytest.mark.parametrize(
  ("model", "changes", "message"),
  [
    (lambda: nn.Dense(2), {}, r"Linen module Dense: give its parameters, .*init\(key, x\)"),
    (lambda: lambda key: {"w": jnp.ones(2)}, {}, "the model of Alternation makes no module of"),
    (
      lambda: Equinox(jax.random.key(0)),
      {"train": ["d/.*"]},
      "phase fit: 'd/.*' matches no parameter's whole path; the nearest are",
    ),
    (
      lambda: Nnx(nnx.Rngs(0)),
      {"loss": None, "optimizer": None, "update": lambda model, batch: model(batch[0])[0]},
      r"the update of phase fit must return the model, or \(model, \{name: scalar\}\)",
    ),
  ],
)
def test_mistakes_are_one_line(model, changes, message):
  keys = {"name": "fit", "train": ["a/.*"], "loss": fit_loss, "optimizer": optax.sgd(0.1)}
  alternation = Alternation([Phase(**{**keys, "steps": 1, **changes})])
  with pytest.raises(UserError, match=message) as error:
    alternation.step(alternation.init(model()), BATCH)
  assert "\n" not in str(error.value)
