"""A step is the same on every mesh up to float32 rounding."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from support.slow_cases import slow
from support.tiny import assert_same_steps, mesh_keys, place, take_steps, uneven_batch

from maxlite.checkpoint.checksum import tree_hash
from maxlite.step.train_state import TrainState

REPLICATED = "ensemble=8"  # every device computes the whole batch, as one device would
# For one family the meshes that shard its special layers, for both together every mesh axis.
CASES = [
  ("llama", "fsdp=4 tensor=2"),
  slow("mixtral", "data=2 fsdp=2 context=2"),
  slow("mixtral", "expert=4 fsdp=2"),
  slow("llama", "ensemble=2 fsdp=4"),
  slow("mixtral", "fsdp=8"),
  slow("mixtral", "fsdp=4 tensor=2"),
]
KEYS = {
  "z_loss_multiplier": 1e-3,
  "router_jitter": 0.2,
}
LOSSES = {
  "llama": {"loss", "z_loss", "total_loss"},
  "mixtral": {"loss", "z_loss", "total_loss", "load_balance_loss", "router_z_loss"},
}


@pytest.fixture(scope="module")
def program_on(program_of):
  """A function from a mesh and a family to a program."""

  def build(mesh, family):
    return program_of(decoder_block=family, **KEYS, **mesh_keys(mesh))

  return build


def three_steps(program, host_state):
  return take_steps(program, host_state, [uneven_batch(seed) for seed in range(3)])


class Replicated(NamedTuple):
  """Three steps of a family where nothing is sharded."""

  family: str
  before: TrainState
  after: TrainState
  rows: list[dict]


@pytest.fixture(scope="module")
def replicated(program_on, request):
  """The steps of the family that is the fixture's parameter."""
  family = request.param
  program = program_on(REPLICATED, family)
  before = jax.device_get(program.init(0))
  after, rows = three_steps(program, before)
  return Replicated(family, before, after, rows)


@pytest.mark.parametrize(("replicated", "mesh"), CASES, indirect=["replicated"])
def test_three_steps_equal_those_on_one_device(program_on, replicated, mesh):
  for row in replicated.rows:
    assert row.keys() > LOSSES[replicated.family] | {"grad_norm"}
  program = program_on(mesh, replicated.family)
  got = three_steps(program, replicated.before)
  assert_same_steps(got, (replicated.after, replicated.rows))


@pytest.mark.slow
def test_the_loss_is_the_mean_over_the_tokens_of_all_rows(program_on):
  program = program_on(REPLICATED, "llama")
  batch = uneven_batch(0)
  placed = place(program, batch)
  before = jax.device_get(program.init(0))
  _, (row,) = take_steps(program, before, [batch])
  logits_BTV = jax.jit(program.model.apply)(
    {"params": before.params}, placed.tokens_BT, placed.segment_BT, placed.position_BT
  )
  logits_BTV = np.asarray(logits_BTV, np.float64)
  partition_BT = np.log(np.sum(np.exp(logits_BTV), axis=-1))
  target_BT1 = np.take_along_axis(logits_BTV, batch.targets_BT[..., None], axis=-1)
  nll_BT = partition_BT - target_BT1[..., 0]
  loss = np.average(nll_BT, weights=batch.weight_BT)
  z_loss = np.average(partition_BT**2, weights=batch.weight_BT)
  np.testing.assert_allclose(row["loss"], loss, rtol=1e-5)
  np.testing.assert_allclose(row["z_loss"], z_loss, rtol=1e-5)


@pytest.mark.parametrize("replicated", ["llama", slow("mixtral")], indirect=True)
def test_the_total_loss_is_the_weighted_sum_of_its_parts(replicated):
  weights = {
    "loss": 1.0,
    "z_loss": 1e-3,
    "load_balance_loss": 0.01,
    "router_z_loss": 0.001,
  }
  for row in replicated.rows:
    total = sum(weight * float(row.get(name, 0)) for name, weight in weights.items())
    np.testing.assert_allclose(row["total_loss"], total, rtol=1e-6)


@pytest.mark.parametrize("replicated", ["llama", slow("mixtral")], indirect=True)
def test_initial_parameters_are_the_same_on_every_mesh(program_on, replicated):
  program = program_on("data=2 fsdp=2 context=2", replicated.family)
  state = program.init(0)
  assert tree_hash(state) == tree_hash(replicated.before)


# Mesh axes that shard parameters, whose results are summed over shards, and rows of the batch.
SHARED = {
  "vocab": "[[vocab, [tensor, fsdp]], [embed, [context, expert]]]",
  "mlp": "[[mlp, [tensor, fsdp]], [embed, [context, expert]], [embed_no_exp, [context]]]",
  "exp": "[[exp, [expert, fsdp]], [embed_no_exp, [context]]]",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("replicated", ["mixtral"], indirect=True)
def test_rules_may_shard_parameters_over_the_axes_of_rows(program_of, replicated, name):
  mesh = mesh_keys("fsdp=2 context=2 tensor=2")
  keys = {"decoder_block": "mixtral", "sparse_matmul": True, "logical_axis_rules": SHARED[name]}
  program = program_of(**KEYS, **keys, **mesh)
  got = three_steps(program, replicated.before)
  assert_same_steps(got, (replicated.after, replicated.rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lamb", "schedule_free_adamw", "novograd"])
def test_steps_of_optimizers_of_optax_are_the_same_on_a_mesh(program_of, name):
  results = []
  for mesh in (REPLICATED, "fsdp=4 tensor=2"):
    program = program_of(decoder_block="llama", opt_type=f"optax.{name}", **mesh_keys(mesh))
    before = jax.device_get(program.init(0)) if not results else results[0][0]
    results.append((before, three_steps(program, before)))
  assert_same_steps(results[1][1], results[0][1])
