"""A step is the same on every mesh up to float32 rounding."""

import functools

import jax
import numpy as np
import pytest
from slow_cases import slow
from tiny import mesh_keys, place, take_steps, trainer_of, uneven_batch

from maxlite.checkpoint.checksum import tree_hash

REPLICATED = "ensemble=8"  # every device computes the whole batch, as one device would
# For one family the meshes that shard its special layers, for both together every mesh axis.
MESHES = {
  "llama": ("fsdp=4 tensor=2",),
  "mixtral": ("data=2 fsdp=2 context=2", "expert=4 fsdp=2"),
}
SLOW_MESHES = {"llama": ("ensemble=2 fsdp=4",), "mixtral": ("fsdp=8", "fsdp=4 tensor=2")}
KEYS = {"z_loss_multiplier": 1e-3, "router_jitter": 0.2}
LOSSES = {
  "llama": {"loss", "z_loss", "total_loss"},
  "mixtral": {"loss", "z_loss", "total_loss", "load_balance_loss", "router_z_loss"},
}


def trainer_on(mesh, family):
  return trainer_of(decoder_block=family, **KEYS, **mesh_keys(mesh))


def three_steps(trainer, host_state):
  return take_steps(trainer, host_state, [uneven_batch(seed) for seed in range(3)])


@functools.cache
def replicated(family):
  """(state before, state after and metrics of three steps) where nothing is sharded."""
  trainer = trainer_on(REPLICATED, family)
  before = jax.device_get(trainer.init_state())
  return before, *three_steps(trainer, before)


@pytest.mark.parametrize(
  ("family", "mesh"),
  [(family, mesh) for family in MESHES for mesh in MESHES[family]]
  + [slow(family, mesh) for family in SLOW_MESHES for mesh in SLOW_MESHES[family]],
)
def test_three_steps_equal_those_on_one_device(family, mesh):
  before, expected, expected_rows = replicated(family)
  state, rows = three_steps(trainer_on(mesh, family), before)
  for row, expected_row in zip(rows, expected_rows, strict=True):
    assert row.keys() == expected_row.keys() > LOSSES[family] | {"grad_norm"}
    for name, value in expected_row.items():
      np.testing.assert_allclose(row[name], value, rtol=1e-5, err_msg=name)
  for leaf, expected_leaf in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-6)


def test_the_loss_is_the_mean_over_the_tokens_of_all_rows():
  trainer = trainer_on(REPLICATED, "llama")
  batch = uneven_batch(0)
  placed = place(trainer, batch)
  before = jax.device_get(trainer.init_state())
  _, (row,) = take_steps(trainer, before, [batch])
  logits_BTV = jax.jit(trainer.model.apply)(
    {"params": before.params}, placed.tokens_BT, placed.segment_BT, placed.position_BT
  )
  logits_BTV = np.asarray(logits_BTV, np.float64)
  partition_BT = np.log(np.sum(np.exp(logits_BTV), axis=-1))
  target_BT = np.take_along_axis(logits_BTV, batch.targets_BT[..., None], axis=-1)[..., 0]
  for name, value_BT in (("loss", partition_BT - target_BT), ("z_loss", partition_BT**2)):
    mean = np.average(value_BT, weights=batch.weight_BT)
    np.testing.assert_allclose(row[name], mean, rtol=1e-5)


@pytest.mark.parametrize("family", MESHES)
def test_the_total_loss_is_the_weighted_sum_of_its_parts(family):
  _, _, rows = replicated(family)
  weights = {
    "loss": 1.0,
    "z_loss": 1e-3,
    "load_balance_loss": 0.01,
    "router_z_loss": 0.001,
  }
  for row in rows:
    total = sum(weight * float(row.get(name, 0)) for name, weight in weights.items())
    np.testing.assert_allclose(row["total_loss"], total, rtol=1e-6)


@pytest.mark.parametrize("family", [slow("llama"), "mixtral"])
def test_initial_parameters_are_the_same_on_every_mesh(family):
  before, *_ = replicated(family)
  born = trainer_on("data=2 fsdp=2 context=2", family).init_state()
  assert tree_hash(born) == tree_hash(before)
