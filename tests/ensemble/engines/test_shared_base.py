"""Members that train a part of the parameters hold the rest once, and equal their solo runs."""

import contextlib
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import largest_error
from support.ensemble_runs import ONE_EACH, TOLERANCE, config, rows_of, start
from support.tiny_run import Output

from maxlite.config.members import members_of
from maxlite.ensemble import Ensemble, Member
from maxlite.ensemble.engines.engine_base import EngineRequest, tree_bytes
from maxlite.ensemble.engines.stack_strategies import build_stacked
from maxlite.ensemble.engines.stacked import StackedEngine
from maxlite.ensemble.members.member import call_model
from maxlite.ensemble.members.model_programs import build_programs
from maxlite.ensemble.members.program import abstract_tree
from maxlite.errors import UserError
from maxlite.runs.run import run_training

WIDTH = 16
ADAPTERS = [r"lora_.*"]
BATCH = np.random.default_rng(0).normal(size=(4, WIDTH)).astype(np.float32)


class Adapted(nn.Module):
  """Dense layers with low-rank adapters."""

  rank: int = 2

  @nn.compact
  def __call__(self, x_BD):
    for n in range(2):
      kernel = self.param(f"kernel_{n}", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
      a = self.param(f"lora_a_{n}", nn.initializers.lecun_normal(), (WIDTH, self.rank))
      b = self.param(f"lora_b_{n}", nn.initializers.normal(), (self.rank, WIDTH))
      x_BD = nn.tanh(x_BD @ kernel + (x_BD @ a) @ b)
    return x_BD


def loss(model, x_BD):
  return jnp.mean((model(x_BD) - 1) ** 2)


def select(params: dict, prefix: str) -> dict:
  return {name: leaf for name, leaf in params.items() if name.startswith(prefix)}


# The frozen parameters of a pretrained model, without adapters.
BASE = select(Adapted().init(jax.random.key(99), BATCH)["params"], "kernel")


def members(count: int) -> list[Member]:
  return [
    Member(
      Adapted(),
      optax.adam,
      seed=z,
      hyperparameters={"learning_rate": 1e-2 / (1 + z)},
      train=ADAPTERS,
    )
    for z in range(count)
  ]


def stacked_engine(members: list[Member]) -> StackedEngine:
  """The engine of an ensemble of the members on one device."""
  programs = build_programs(members, loss, call_model, BATCH, BASE)
  request = EngineRequest(
    num_members=len(programs),
    program=lambda z, _: programs[z],
    batch=abstract_tree(BATCH),
    devices=jax.devices()[:1],
  )
  return build_stacked(request)


def solo_run(member: Member, num_steps: int) -> tuple[list[float], dict]:
  """(losses, parameters) of the loop that a user would write."""
  drawn = Adapted().init(jax.random.key(member.seed), BATCH)["params"]
  adapters = select(drawn, "lora")
  tx = member.build_optimizer()
  opt_state = tx.init(adapters)
  losses = []

  def compute(adapters):
    return nn.apply(loss, Adapted())({"params": BASE | adapters}, BATCH)

  for _ in range(num_steps):
    value, gradients = jax.value_and_grad(compute)(adapters)
    updates, opt_state = tx.update(gradients, opt_state, adapters)
    adapters = optax.apply_updates(adapters, updates)
    losses.append(float(value))
  return losses, BASE | adapters


@pytest.mark.parametrize("strategy", ["stacked", pytest.param("submesh", marks=pytest.mark.slow)])
def test_adapters_on_one_base_equal_solo_runs(strategy):
  own = members(3)
  ensemble = Ensemble(own, loss, strategy=strategy, devices=jax.devices()[:1], base=BASE)
  losses = []
  with jax.numpy_dtype_promotion("standard"):
    state = ensemble.init(BATCH)
    for _ in range(3):
      state, metrics = ensemble.step(state, BATCH)
      losses.append(np.asarray(metrics["loss"]))
    for z, (name, member) in enumerate(zip(ensemble.names, own, strict=True)):
      expected, params = solo_run(member, 3)
      np.testing.assert_allclose(np.stack(losses)[:, z], expected, rtol=1e-6)
      got = ensemble.member_params(state, name)["params"]
      assert largest_error(got, params) <= 1e-6
      assert largest_error(select(got, "kernel"), BASE) == 0


@pytest.mark.slow
def test_the_base_is_held_once():
  for count in (2, 16):
    ensemble = Ensemble(
      members(count), loss, strategy="stacked", devices=jax.devices()[:1], base=BASE
    )
    state = ensemble.init(BATCH)
    (group,) = state
    assert {name for name, part in group.shared.items() if jax.tree.leaves(part)} == set(BASE)
    trained = tree_bytes(ensemble.members[0].model.init(jax.random.key(0), BATCH)["params"])
    trained -= tree_bytes(BASE)
    # The trained parameters, two moments, and a few numbers per member.
    most = tree_bytes(BASE) + count * (3 * trained + 64)
    assert tree_bytes(state) <= most
    engine = stacked_engine(ensemble.members)
    step = engine.jitted_step.lower(state, BATCH).compile()
    assert step.memory_analysis().argument_size_in_bytes <= most + BATCH.nbytes


def test_states_of_members_with_one_base_are_restored():
  ensemble = Ensemble(members(2), loss, strategy="stacked", devices=jax.devices()[:1], base=BASE)
  state, _ = ensemble.step(ensemble.init(BATCH), BATCH)
  states = ensemble.member_states(state)
  assert states["m0"].params["kernel_0"] is states["m1"].params["kernel_0"]
  before = jax.tree.map(np.array, states)  # a view would keep its array from being donated
  _, expected = ensemble.step(ensemble.load_states(states), BATCH)
  _, metrics = ensemble.step(state, BATCH)  # donates the state, and no array of `states`
  assert largest_error(states, before) == 0
  assert largest_error(metrics["loss"], expected["loss"]) == 0
  other = jax.tree.map(np.asarray, states)
  other["m1"].params["kernel_0"] = other["m1"].params["kernel_0"] + 1
  with pytest.raises(
    UserError, match="kernel_0 is frozen and shared, but differs between m0 and m1"
  ):
    ensemble.load_states(other)


@pytest.mark.parametrize(
  ("wrong", "message"),
  [
    (
      {"kernel_0": BASE["kernel_0"]},
      "base lacks kernel_1, which is frozen: give it, or train it",
    ),
    (BASE | {"kernel_2": np.ones(1)}, "base has kernel_2, which the model Adapted does not have"),
    (
      BASE | {"kernel_1": np.ones(3)},
      r"kernel_1 of base has shape \(3,\), and that of the model",
    ),
  ],
)
def test_a_base_of_another_model_is_one_line(wrong, message):
  with pytest.raises(UserError, match=message) as error:
    Ensemble(members(2), loss, base=wrong).init(BATCH)
  assert "\n" not in str(error.value)


@pytest.mark.slow
def test_config_members_with_adapters_share_the_run_they_start_from(tmp_path):
  parent_cfg = config(tmp_path, "[{name: parent}, {name: other, init_weights_seed: 7}]")
  parent, _ = members_of(parent_cfg)
  with contextlib.redirect_stdout(Output()):
    assert run_training(parent.config) == 0
  run = parent.config.run
  keys = {
    "lora_rank": 2,
    "phases": "[{name: lora, train: [.*lora.*], steps: 1}]",
    "load_parameters_path": Path(run.base_output_directory) / run.run_name,
    "ensemble_strategy": "stacked",
  }
  entries = "[{name: a, learning_rate: 1e-2}, {name: b, learning_rate: 1e-3, init_weights_seed: 3}]"
  code, _ = start(tmp_path / "ensemble", entries, **keys, **ONE_EACH)
  assert code == 0
  for member in members_of(config(tmp_path / "alone", entries, **keys)):
    with contextlib.redirect_stdout(Output()):
      assert run_training(member.config) == 0
    here = rows_of(tmp_path / "ensemble", member.name)
    there = rows_of(tmp_path / "alone", member.name)
    for row, expected in zip(here, there, strict=True):
      np.testing.assert_allclose(row["loss"], expected["loss"], rtol=TOLERANCE)
