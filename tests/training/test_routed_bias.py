"""The routers' biases move by the global load alone: by their rule, on every mesh, and by no other.

Every comparison is bit for bit.
"""

import functools

import jax
import numpy as np
import pytest
from tiny import mesh_keys, place, state_on, take_steps, trainer_of, uneven_batch

from maxlite.optim import OPTIMIZERS
from maxlite.training.routed_bias import move_routed_biases

RATE = 0.003
KEYS = {
  "routed_bias": "true",
  "routed_bias_update_rate": RATE,
  "router": "sigmoid_group_topk",
  "adam_weight_decay": 0.1,
}
MESHES = ("fsdp=8", "fsdp=4 tensor=2", "data=2 fsdp=2 context=2", "expert=4 fsdp=2")
BATCHES = [uneven_batch(seed) for seed in range(3)]


@functools.cache
def first_state():
  """Of biases that are not zero, so that weight decay would show."""
  state = jax.device_get(trainer_of(**mesh_keys(MESHES[0]), **KEYS).init_state())
  return with_bias(state, 0.05 * np.random.default_rng(0).normal(size=bias_of(state).shape))


def bias_of(state):
  return state.params["layers"]["moe"]["router"]["bias"]


def with_bias(state, bias_NE):
  params = jax.tree.map(lambda leaf: leaf, state.params)
  params["layers"]["moe"]["router"]["bias"] = bias_NE.astype(np.float32)
  return state.replace(params=params)


def expected_bias(bias_NE, rows):
  """The rule in numpy, from the loads that the steps reported."""
  for row in rows:
    count_NE = row["expert_load"]
    short_NE = np.sign(count_NE.mean(-1, keepdims=True) - count_NE)
    bias_NE = bias_NE + np.float32(RATE) * short_NE.astype(np.float32)
  return bias_NE


@functools.cache
def three_steps(mesh=MESHES[0], **keys):
  return take_steps(trainer_of(**mesh_keys(mesh), **KEYS, **keys), first_state(), BATCHES)


def test_a_bias_moves_towards_the_experts_that_got_too_little():
  state, rows = three_steps()
  np.testing.assert_array_equal(bias_of(state), expected_bias(bias_of(first_state()), rows))
  assert bias_of(state).dtype == np.float32
  moved_NE = bias_of(state) - bias_of(first_state())
  assert (np.abs(moved_NE) > 2 * RATE).any()
  assert all(row["expert_load"].sum() == 2 * row["expert_load"][0].sum() for row in rows)


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_every_mesh_and_every_device_has_the_same_bits(mesh):
  expected, _ = three_steps()
  trainer = trainer_of(**mesh_keys(mesh), **KEYS)
  state = state_on(trainer, first_state())
  for batch in BATCHES:
    state, _ = trainer.train_step(state, place(trainer, batch))
  shards = bias_of(state).addressable_shards
  assert len(shards) == 8
  for shard in shards:
    np.testing.assert_array_equal(shard.data, bias_of(expected))


def test_micro_batches_make_one_load():
  state, rows = three_steps(gradient_accumulation_steps=4, load_balance_loss_scope="sequence")
  expected, expected_rows = three_steps()
  for row, expected_row in zip(rows, expected_rows, strict=True):
    np.testing.assert_array_equal(row["expert_load"], expected_row["expert_load"])
  np.testing.assert_array_equal(bias_of(state), bias_of(expected))


@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_no_optimizer_moves_it(opt_type):
  """Nor does it enter the gradient's norm: a bias that moves is all that is not clipped away."""
  keys = {"opt_type": opt_type, "gradient_clipping_threshold": 0.5}
  trainer = trainer_of(**mesh_keys(MESHES[0]), **KEYS, **keys)
  before = jax.device_get(trainer.init_state()).replace(params=first_state().params)
  state, rows = take_steps(trainer, before, BATCHES[:2])
  np.testing.assert_array_equal(bias_of(state), expected_bias(bias_of(before), rows))
  still = {"routed_bias_update_rate": 0.0}
  trainer = trainer_of(**mesh_keys(MESHES[0]), **(KEYS | keys | still))
  state, _ = take_steps(trainer, before, BATCHES[:2])
  np.testing.assert_array_equal(bias_of(state), bias_of(before))
  assert (state.params["layers"]["moe"]["wo"] != before.params["layers"]["moe"]["wo"]).any()


def test_a_skipped_step_leaves_it():
  trainer = trainer_of(**mesh_keys(MESHES[0]), **KEYS)
  weight_BT = BATCHES[0].weight_BT.copy()
  weight_BT[0, 0] = np.nan
  state, (row,) = take_steps(trainer, first_state(), [BATCHES[0].replace(weight_BT=weight_BT)])
  assert row["skipped"] == 1
  assert row["expert_load"].std() > 0
  np.testing.assert_array_equal(bias_of(state), bias_of(first_state()))


def test_layers_that_are_not_stacked_are_found_in_their_order():
  """Twelve of them, so that layers_10 could come before layers_2, and dense ones between."""
  count_NE = np.random.default_rng(0).integers(0, 9, (7, 4)).astype(np.float32)
  apart = {f"layers_{i}": {"mlp": {"bias": np.zeros(3)}} for i in range(13)}
  for layer in range(0, 13, 2):
    apart[f"layers_{layer}"] = {"moe": {"router": {"bias": np.zeros(4, np.float32)}}}
  moved = move_routed_biases(apart, count_NE, RATE)
  stacked = {"layers": {"moe": {"router": {"bias": np.zeros((7, 4), np.float32)}}}}
  expected_NE = move_routed_biases(stacked, count_NE, RATE)["layers"]["moe"]["router"]["bias"]
  for n, layer in enumerate(range(0, 13, 2)):
    got_E = moved[f"layers_{layer}"]["moe"]["router"]["bias"]
    np.testing.assert_array_equal(got_E, expected_NE[n])
  np.testing.assert_array_equal(moved["layers_1"]["mlp"]["bias"], 0)
  short_NE = np.sign(count_NE.mean(-1, keepdims=True) - count_NE)
  np.testing.assert_array_equal(expected_NE, np.float32(RATE) * short_NE.astype(np.float32))


def test_in_the_long_run_the_load_is_even():
  """Of a model that does not learn: what evens out the load is the bias."""
  keys = {"learning_rate": 0.0, "routed_bias_update_rate": 0.01}
  trainer = trainer_of(**mesh_keys(MESHES[0]), **(KEYS | keys))
  before = with_bias(first_state(), np.zeros_like(bias_of(first_state())))
  _, rows = take_steps(trainer, before, [BATCHES[0]] * 60)
  uneven = [np.max(np.abs(r["expert_load"] / r["expert_load"].mean(-1)[:, None] - 1)) for r in rows]
  assert np.mean(uneven[-10:]) < uneven[0] / 2
