"""Ensembles of Equinox, NNX and plain functions: what their users ask for, and their mistakes."""

import functools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import largest_error
from flax import nnx
from library_models import (
  BATCHES,
  EquinoxNet,
  NnxNet,
  apply_layers,
  arrays_of,
  init_layers,
  loss,
  make_member,
  predict,
)
from support.slow_cases import slow

from maxlite.ensemble import Ensemble, Member
from maxlite.ensemble.engines.grouping import group_members
from maxlite.ensemble.members.model_programs import build_programs
from maxlite.errors import UserError

ROOT = Path(__file__).parents[2]
X_BD = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
BATCH = (X_BD, X_BD[:, ::-1] ** 2)
FIELDS = {"widths": (4,), "act": jnp.tanh, "has_norm": False, "rate": 0.0}
ONE_DEVICE = jax.devices()[:1]


@pytest.fixture(autouse=True)
def standard_promotion():
  """As users have it; equinox and the loops of these tests mix types."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def squares(model, batch):
  return jnp.mean((jax.vmap(model)(batch[0]) - batch[1]) ** 2)


def over_rows(model, x_BD):
  return jax.vmap(model)(x_BD)


def mlp(depth):
  return lambda key: eqx.nn.MLP(2, 2, 2, depth, key=key)


def groups_of(ensemble):
  return [len(group.programs) for group in ensemble._engine.groups]


def test_equinox_786_members_of_every_depth_train_together():
  """https://github.com/patrick-kidger/equinox/issues/786"""
  members = [Member(mlp(depth), optax.adam(1e-2), name=f"d{depth}") for depth in (1, 2, 3)]
  ensemble = Ensemble(members, squares, predict=over_rows, devices=ONE_DEVICE)
  state = ensemble.init(BATCH)
  first, metrics = None, None
  for _ in range(5):
    state, metrics = ensemble.step(state, BATCH)
    first = metrics["loss"] if first is None else first
  assert np.all(metrics["loss"] < first)
  assert ensemble.predict(state, X_BD).members.shape == (3, 8, 2)
  assert isinstance(ensemble.member(state, "d3"), eqx.nn.MLP)
  assert ensemble.labels == {
    "d1": "depth=1 parameters=12",
    "d2": "depth=2 parameters=18",
    "d3": "depth=3 parameters=24",
  }


@pytest.mark.slow
def test_equinox_693_eight_members_are_one_program_and_equal_a_vmapped_loop():
  """https://github.com/patrick-kidger/equinox/issues/693"""
  make = mlp(2)
  rates = [0.01 * 2**n for n in range(8)]
  members = [
    Member(make, optax.adamw, z, hyperparameters={"learning_rate": rate})
    for z, rate in enumerate(rates)
  ]
  ensemble = Ensemble(members, squares, strategy="stacked", devices=ONE_DEVICE)
  state = ensemble.init(BATCH)
  assert groups_of(ensemble) == [8]

  models = eqx.filter_vmap(make)(jnp.stack([jax.random.key(z) for z in range(8)]))

  def start(model, rate):
    tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    return optax.tree.set(opt_state, learning_rate=rate)

  @eqx.filter_jit
  def step(models, opt_states):
    def step_one(model, opt_state):
      value, gradients = eqx.filter_value_and_grad(squares)(model, BATCH)
      params = eqx.filter(model, eqx.is_inexact_array)
      tx = optax.inject_hyperparams(optax.adamw)(learning_rate=0.0)
      updates, opt_state = tx.update(gradients, opt_state, params)
      return eqx.apply_updates(model, updates), opt_state, value

    return eqx.filter_vmap(step_one)(models, opt_states)

  opt_states = eqx.filter_vmap(start)(models, jnp.asarray(rates))
  for _ in range(3):
    state, metrics = ensemble.step(state, BATCH)
    models, opt_states, want_Z = step(models, opt_states)
    assert largest_error(np.asarray(metrics["loss"]), np.asarray(want_Z)) <= 2e-5


def test_optax_577_and_932_a_rate_per_model_is_data_of_the_program():
  """https://github.com/google-deepmind/optax/issues/577 and 932: other rates, the same program."""
  programs = []
  for rates in ((0.1, 0.2), (0.3, 0.05)):
    members = [
      Member(mlp(1), optax.adam, hyperparameters={"learning_rate": rate}) for rate in rates
    ]
    ensemble = Ensemble(members, squares, strategy="stacked", devices=ONE_DEVICE)
    state = ensemble.init(BATCH)
    (group,) = state
    stored = group.members.opt_state.hyperparams["learning_rate"]
    np.testing.assert_allclose(stored, rates, rtol=1e-6)
    programs.append(ensemble._engine.jitted_step.lower(state, BATCH).as_text())
  assert programs[0] == programs[1]


def test_equinox_313_a_member_comes_out_as_the_module_that_went_in():
  """https://github.com/patrick-kidger/equinox/issues/313"""
  given = [eqx.nn.MLP(2, 2, 4, 1, key=jax.random.key(z)) for z in range(3)]
  members = [Member(model, optax.sgd(0.0)) for model in given]
  ensemble = Ensemble(members, squares, strategy="stacked", devices=ONE_DEVICE)
  state = ensemble.init(BATCH)
  assert groups_of(ensemble) == [3]
  state, _ = ensemble.step(state, BATCH)
  for name, model in zip(ensemble.names, given, strict=True):
    assert eqx.tree_equal(ensemble.member(state, name), model)


def test_equinox_905_the_members_asked_for_are_chosen_by_data():
  """https://github.com/patrick-kidger/equinox/issues/905"""
  make = mlp(1)
  members = [Member(make, optax.sgd(0.1), z) for z in range(6)]
  ensemble = Ensemble(members, squares, predict=lambda model, x_D: model(x_D), devices=ONE_DEVICE)
  state = ensemble.init(BATCH)
  models = [ensemble.member(state, name) for name in ensemble.names]
  engine = ensemble._engine
  for asked in ([4, 0, 4, 5], [1, 2, 3, 0]):
    got = ensemble.predict(state, X_BD[:4], members=np.array(asked), own_inputs=True)
    want = np.stack([models[z](x_D) for z, x_D in zip(asked, X_BD, strict=False)])
    assert largest_error(np.asarray(got.members), want) <= 1e-6
  assert [function._cache_size() for function in engine._predict_rows] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fused", "submesh", "switched"])
def test_a_subset_predicts_what_it_does_among_all(strategy):
  members = [
    make_member("equinox", FIELDS, optax.sgd(0.1), 0),
    make_member("nnx", FIELDS, optax.sgd(0.1), 1),
    make_member("equinox", FIELDS, optax.sgd(0.1), 2),
  ]
  ensemble = Ensemble(
    members, loss, predict=predict, strategy=strategy, devices=jax.devices()[: len(members)]
  )
  state = ensemble.init(BATCHES[0])
  whole = ensemble.predict(state, BATCHES[0]).members
  part = ensemble.predict(state, BATCHES[0], members=["m2", 1]).members
  assert largest_error(np.asarray(part), np.asarray(whole[np.array([2, 1])])) <= 1e-6
  apart = ensemble.predict(state, BATCHES[:2], members=["m1", "m0"], own_inputs=True)
  assert largest_error(np.asarray(apart.members[0]), np.asarray(whole[1])) <= 1e-6
  assert apart.mean.shape == apart.disagreement.shape == (4, 1)


@pytest.mark.parametrize("library", [slow("equinox"), "nnx"])
def test_given_and_made_members_of_one_structure_are_one_group(library):
  fields = FIELDS | {"has_norm": True}
  members = [
    make_member(library, fields, optax.sgd(0.1), seed, given=given)
    for seed, given in ((1, True), (2, False), (3, True))
  ]
  ensemble = Ensemble(members, loss, strategy="stacked", devices=ONE_DEVICE)
  state = ensemble.init(BATCHES[0])
  assert groups_of(ensemble) == [3]
  made = [make_member(library, fields, optax.sgd(0.1), z, given=True) for z in (1, 2, 3)]
  for name, member in zip(ensemble.names, made, strict=True):
    assert largest_error(arrays_of(ensemble.member(state, name)), arrays_of(member.model)) <= 1e-6


def test_structure_that_differs_makes_groups():
  """Widths, functions, types of numbers and shapes; not the place in the code."""

  def net(scale, width=2, act=jnp.tanh):
    return lambda key: Scaled(eqx.nn.MLP(2, 2, width, 1, act, key=key), scale)

  makes = [net(1.0), net(1.0), net(1), net(True), net(1.0, 3), net(1.0, act=jnp.sin)]
  assert group_sizes([Member(make, optax.sgd(0.1)) for make in makes], BATCH) == [2, 1, 1, 1, 1]
  nets = [
    functools.partial(NnxNet, **FIELDS | change)
    for change in ({}, {}, {"act": jnp.sin}, {"rate": 0}, {"widths": (5,)})
  ]
  members = [Member(make, optax.sgd(0.1)) for make in nets]
  assert group_sizes(members, BATCHES[0]) == [2, 1, 1, 1]


def group_sizes(members, batch):
  programs = build_programs(members, squares, over_rows, batch)
  return [len(group) for group in group_members(programs)]


class Scaled(eqx.Module):
  mlp: eqx.nn.MLP
  scale: float = eqx.field(static=True)

  def __call__(self, x_D):
    return self.mlp(x_D) * self.scale


@pytest.mark.slow
def test_parameters_are_frozen_by_their_paths():
  members = [
    Member(mlp(1), optax.sgd(0.1), train=["layers/1/.*"]),
    Member(functools.partial(Plain, 3), optax.sgd(0.1), train=["b/kernel"]),
  ]
  ensemble = Ensemble(
    members,
    lambda model, batch: jnp.mean((run_rows(model, batch[0]) - batch[1]) ** 2),
    devices=ONE_DEVICE,
  )
  state = ensemble.init(BATCH)
  before = [ensemble.member(state, name) for name in ensemble.names]
  state, _ = ensemble.step(state, BATCH)
  first, second = (ensemble.member(state, name) for name in ensemble.names)
  np.testing.assert_array_equal(first.layers[0].weight, before[0].layers[0].weight)
  assert np.any(first.layers[1].weight != before[0].layers[1].weight)
  np.testing.assert_array_equal(second.a.kernel[...], before[1].a.kernel[...])
  np.testing.assert_array_equal(second.b.bias[...], before[1].b.bias[...])
  assert np.any(second.b.kernel[...] != before[1].b.kernel[...])


def run_rows(model, x_BD):
  return jax.vmap(model)(x_BD) if isinstance(model, eqx.Module) else model(x_BD)


def test_functions_may_return_arrays_of_numpy():
  weights = np.eye(2)  # float64, of which JAX keeps 32 bits
  members = [Member(init=lambda key: {"w": weights}, apply=project, optimizer=optax.sgd(0.1))]
  ensemble = Ensemble(members, lambda model, batch: jnp.mean((model(batch[0]) - batch[1]) ** 2))
  state = ensemble.init(BATCH)
  np.testing.assert_array_equal(ensemble.member(state, "m0")["w"], weights)
  state, _ = ensemble.step(state, BATCH)
  assert np.any(ensemble.member(state, "m0")["w"] != weights)


def project(tree, x_BD):
  return x_BD @ tree["w"]


class Plain(nnx.Module):
  def __init__(self, width, *, rngs):
    self.a = nnx.Linear(2, width, rngs=rngs)
    self.b = nnx.Linear(width, 2, rngs=rngs)

  def __call__(self, x_BD):
    return self.b(jnp.tanh(self.a(x_BD)))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["equinox", "nnx"])
def test_a_pretrained_model_is_the_base_of_adapters_and_is_held_once(library):
  class Adapted(nnx.Module):
    def __init__(self, rngs):
      self.base = Plain(3, rngs=rngs)
      self.extra = nnx.Linear(2, 2, rngs=rngs)

    def __call__(self, x_BD):
      return self.base(x_BD) + self.extra(x_BD)

  class AdaptedEquinox(eqx.Module):
    base: eqx.nn.MLP
    extra: eqx.nn.Linear

    def __init__(self, key):
      self.base = eqx.nn.MLP(2, 2, 3, 1, key=key)
      self.extra = eqx.nn.Linear(2, 2, key=jax.random.fold_in(key, 1))

    def __call__(self, x_D):
      return self.base(x_D) + self.extra(x_D)

  make = {"nnx": Adapted, "equinox": AdaptedEquinox}[library]
  base = Adapted(nnx.Rngs(7)) if library == "nnx" else AdaptedEquinox(jax.random.key(7))
  members = [Member(make, optax.sgd(0.1), seed, train=["extra/.*"]) for seed in range(2)]
  ensemble = Ensemble(
    members,
    lambda model, batch: jnp.mean((run_rows(model, batch[0]) - batch[1]) ** 2),
    strategy="stacked",
    devices=ONE_DEVICE,
    base=base,
  )
  state = ensemble.init(BATCH)
  (group,) = state
  assert len(jax.tree.leaves(group.shared)) == 4
  state, _ = ensemble.step(state, BATCH)
  for name in ensemble.names:
    member = ensemble.member(state, name)
    want = nnx.state(base.base) if library == "nnx" else base.base
    got = nnx.state(member.base) if library == "nnx" else member.base
    assert largest_error(arrays_of(got), arrays_of(want)) == 0
  arrays = [arrays_of(ensemble.member(state, name)) for name in ensemble.names]
  assert largest_error(*arrays) == 0  # from equal bases, one batch and one optimizer


@pytest.mark.slow
@pytest.mark.parametrize("library", ["equinox", "nnx", "functions"])
def test_states_are_saved_and_loaded(library, tmp_path):
  fields = FIELDS | {"has_norm": library != "functions"}
  members = [make_member(library, fields, optax.adam(0.1), seed) for seed in range(2)]
  ensemble = Ensemble(members, loss, predict=predict, strategy="stacked", devices=ONE_DEVICE)
  state, _ = ensemble.step(ensemble.init(BATCHES[0]), BATCHES[0])
  ensemble.save(state, tmp_path / "state")
  again = Ensemble(members, loss, predict=predict, strategy="submesh", devices=ONE_DEVICE)
  loaded = again.load(tmp_path / "state", BATCHES[0])
  for name in ensemble.names:
    pair = (arrays_of(ensemble.member(state, name)), arrays_of(again.member(loaded, name)))
    assert largest_error(*pair) == 0
  again.step(loaded, BATCHES[1])


def make_parts():
  """A factory for worker processes."""
  members = [make_member("equinox", FIELDS | {"has_norm": True}, optax.sgd(0.1), z) for z in (0, 1)]
  members.append(make_member("nnx", FIELDS, optax.sgd(0.1), 2))
  return {"members": members, "loss": loss, "predict": predict}


@pytest.mark.slow
def test_members_train_in_worker_processes(monkeypatch):
  monkeypatch.setenv("JAX_NUMPY_DTYPE_PROMOTION", "standard")
  monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")
  remote = Ensemble.from_factory(f"{__name__}:make_parts", num_workers=2, strategy="processes")
  local = Ensemble(**make_parts(), strategy="submesh", devices=ONE_DEVICE)
  states = [ensemble.init(BATCHES[0]) for ensemble in (remote, local)]
  for batch in BATCHES:
    for n, ensemble in enumerate((remote, local)):
      states[n], _ = ensemble.step(states[n], batch)
  for name in remote.names:
    got, want = arrays_of(remote.member(states[0], name)), arrays_of(local.member(states[1], name))
    assert largest_error(got, want) == 0
  part = remote.predict(states[0], BATCHES[0], members=[2, "m0"])
  whole = remote.predict(states[0], BATCHES[0])
  want = np.asarray(whole.members[np.array([2, 0])])
  assert largest_error(np.asarray(part.members), want) <= 1e-6


@pytest.mark.slow
def test_nnx_members_of_other_widths_are_padded():
  optimizer = optax.sgd(0.1)
  members = [make_member("nnx", FIELDS | {"widths": (n,)}, optimizer, n) for n in (3, 5)]
  padded = Ensemble(members, loss, predict=predict, strategy="padded", devices=ONE_DEVICE)
  fused = Ensemble(members, loss, predict=predict, strategy="fused", devices=ONE_DEVICE)
  states = [ensemble.init(BATCHES[0]) for ensemble in (padded, fused)]
  for batch in BATCHES:
    for n, ensemble in enumerate((padded, fused)):
      states[n], _ = ensemble.step(states[n], batch)
  got = padded.predict(states[0], BATCHES[0]).members
  want = fused.predict(states[1], BATCHES[0]).members
  assert largest_error(np.asarray(got), np.asarray(want)) <= 1e-5


def first_step(members, loss=squares, **keys):
  ensemble = Ensemble(members, loss, devices=ONE_DEVICE, **keys)
  ensemble.step(ensemble.init(BATCH), BATCH)


def given_mlp():
  return eqx.nn.MLP(2, 2, 3, 1, key=jax.random.key(0))


@pytest.mark.parametrize(
  ("build", "message"),
  [
    (lambda: Member(nn.Dense, optax.sgd(0.1)), r"model=Dense .* call it, Dense\("),
    (lambda: Member(3, optax.sgd(0.1)), r"model=int of a Member is not .* Module"),
    (lambda: Member(optimizer=optax.sgd(0.1)), "model=NoneType of a Member"),
    (
      lambda: Member(init=init_layers, optimizer=optax.sgd(0.1)),
      "a Member takes a model, or init=",
    ),
    (
      lambda: Member(given_mlp(), optax.sgd(0.1), init=init_layers, apply=apply_layers),
      "a Member takes a model, or init=",
    ),
    (
      lambda: first_step([Member(lambda key: {"w": jnp.ones(2)}, optax.sgd(0.1))]),
      "the model of member m0 makes no module of Equinox or NNX; give .*init= and apply=",
    ),
    (
      lambda: first_step([Member(given_mlp(), optax.sgd(0.1), seed=3)]),
      "seed=3: the model of member m0 .*its own arrays, .* leave it out, or give a function",
    ),
    (
      lambda: first_step([Member(given_mlp(), optax.sgd(0.1))], base=given_mlp()),
      "base=: the model of member m0 .* leave base out",
    ),
    (
      lambda: first_step([Member(mlp(1), optax.sgd(0.1), train=["layer/.*"])]),
      "'layer/.*' matches no parameter's whole path; the nearest are layers/",
    ),
    (
      lambda: first_step(
        [Member(init=lambda key: {"w": 1.0}, apply=lambda tree, x: x, optimizer=optax.sgd(0.1))]
      ),
      "init of <lambda> returns w, a float, which is not an array",
    ),
    (
      lambda: first_step([Member(mlp(1), optax.sgd(0.1))], lambda model, batch: (1.0, 2.0)),
      "the loss of the model MLP returns a float as its second value, not a dict of metrics",
    ),
    (
      lambda: first_step(
        [Member(m, optax.sgd(0.1)) for m in (mlp(1), mlp(2))], squares, strategy="stacked"
      ),
      "depth is 1 in m0, and 2 in m1; use fused",
    ),
  ],
)
def test_mistakes_are_one_line(build, message):
  with pytest.raises(UserError, match=message) as error:
    build()
  assert "\n" not in str(error.value)


def test_a_loss_that_gets_the_state_returns_it():
  def forgets(model, x_BD, key, state):
    value, metrics, _ = loss(model, x_BD, key, state)
    return value, metrics

  fields = FIELDS | {"has_norm": True}
  ensemble = Ensemble([make_member("equinox", fields, optax.sgd(0.1), 0)], forgets)
  with pytest.raises(UserError, match=r"returns 2 values, not \(scalar, \{name: scalar\}, state\)"):
    ensemble.step(ensemble.init(BATCHES[0]), BATCHES[0])


def test_a_nnx_loss_that_changes_a_parameter_is_refused():
  def renormalizes(model, batch):
    model.a.kernel[...] = model.a.kernel[...] / 2
    return jnp.mean(model(batch[0]))

  with pytest.raises(UserError, match="the loss of the model Plain changes the parameter a/kernel"):
    first_step([Member(functools.partial(Plain, 3), optax.sgd(0.1))], renormalizes)


def test_predict_names_members_that_are_not_there():
  ensemble = Ensemble([Member(mlp(1), optax.sgd(0.1))], squares, predict=over_rows)
  state = ensemble.init(BATCH)
  for members, message in (
    (["m3"], "no member 'm3'; there are m0"),
    ([1], "no member 1; there are 1, from 0"),
    ([], r"members=\[\] asks nobody"),
  ):
    with pytest.raises(UserError, match=message):
      ensemble.predict(state, X_BD, members=members)
  with pytest.raises(UserError, match=r"own_inputs=True .* does not have a first axis of 1"):
    ensemble.predict(state, X_BD, members=[0], own_inputs=True)


class Normed(eqx.Module):
  """The stateful module of the page."""

  linear: eqx.nn.Linear
  norm: eqx.nn.BatchNorm
  dropout: eqx.nn.Dropout

  def __init__(self, key):
    self.linear = eqx.nn.Linear(2, 1, key=key)
    self.norm = eqx.nn.BatchNorm(1, axis_name="batch", mode="batch")
    self.dropout = eqx.nn.Dropout(0.5)

  def __call__(self, x_D, state, key):
    x_D, state = self.norm(self.linear(x_D), state)
    return self.dropout(x_D, key=key), state


class NnxMlp(nnx.Module):
  def __init__(self, width, *, rngs):
    self.a = nnx.Linear(2, width, rngs=rngs)
    self.b = nnx.Linear(width, 1, rngs=rngs)

  def __call__(self, x_BD):
    return self.b(jnp.tanh(self.a(x_BD)))


@pytest.mark.slow
def test_the_lines_of_the_page_run_for_every_library(tmp_path):
  text = (ROOT / "docs" / "ensembles.md").read_text("utf-8")
  section = text[text.index("## Any module library") : text.index("### What is trained")]
  blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
  assert len(blocks) == 6
  script = tmp_path / "example.py"
  script.write_text("\n".join([*blocks, "members_of_linen = members\n"]))
  inputs = {"batch": (X_BD, X_BD[:, :1]), "Net": Normed, "MLP": NnxMlp}
  names = runpy.run_path(str(script), inputs)
  assert isinstance(names["model"], NnxMlp)
  assert isinstance(names["model_state"], eqx.nn.State)
  assert set(names["params"]) == {"in", "out"}
  assert isinstance(names["module"], nn.Module)


WITHOUT_EQUINOX = """
import sys
sys.modules["equinox"] = None  # as if it was not installed: importing it fails
import flax.linen as nn, jax, jax.numpy as jnp, optax
from flax import nnx
from maxlite.ensemble import Ensemble, Member
from maxlite.ensemble.engines.grouping import group_members
from maxlite.ensemble.members.model_programs import build_programs
from maxlite.phases import Alternation, Phase

net = lambda rngs: nnx.Linear(2, 1, rngs=rngs)
members = [Member(nn.Dense(1), optax.sgd(0.1)), Member(net, optax.sgd(0.1))]
ensemble = Ensemble(members, lambda model, x: jnp.mean(model(x) ** 2))
ensemble.step(ensemble.init(jnp.ones((3, 2))), jnp.ones((3, 2)))
phase = Phase("a", ["kernel"], lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), steps=1)
alternation = Alternation([phase])
alternation.step(alternation.init(net), jnp.ones((3, 2)))
"""


@pytest.mark.slow
def test_equinox_is_optional():
  subprocess.run([sys.executable, "-c", WITHOUT_EQUINOX], check=True, timeout=200)
  assert EquinoxNet is not None
