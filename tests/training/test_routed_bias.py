"""Routers' biases follow their rule for the global load, bitwise equal on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import slow
from tiny import config_of, mesh_keys, place, state_on, take_steps, trainer_of, uneven_batch

from maxlite.config.registry import OPTIMIZERS
from maxlite.config.schema import DEFAULTS, MoeConfig, build
from maxlite.layers.moe.router import Router
from maxlite.optim import build_optimizer
from maxlite.training.routed_bias import move_routed_biases

RATE = 0.003
KEYS = {
  "routed_bias": "true",
  "routed_bias_update_rate": RATE,
  "router": "sigmoid_group_topk",
  "adam_weight_decay": 0.1,
}
MESHES = ("fsdp=8", "data=2 context=2 tensor=2", "expert=4 fsdp=2")
BATCHES = [uneven_batch(seed) for seed in range(3)]


@functools.cache
def first_state():
  """With nonzero biases, to detect weight decay."""
  state = jax.device_get(trainer_of(**mesh_keys(MESHES[0]), **KEYS).init_state())
  return with_bias(state, 0.05 * np.random.default_rng(0).normal(size=bias_of(state).shape))


def bias_of(state):
  return state.params["layers"]["moe"]["router"]["bias"]


def with_bias(state, bias_NE):
  params = jax.tree.map(lambda leaf: leaf, state.params)
  params["layers"]["moe"]["router"]["bias"] = bias_NE.astype(np.float32)
  return state.replace(params=params)


def expected_bias(bias_NE, rows):
  """The rule in numpy, from the reported loads."""
  for row in rows:
    count_NE = row["expert_load"]
    short_NE = np.sign(count_NE.mean(-1, keepdims=True) - count_NE)
    bias_NE = bias_NE + np.float32(RATE) * short_NE.astype(np.float32)
  return bias_NE


@functools.cache
def three_steps(mesh=MESHES[0], **keys):
  return take_steps(trainer_of(**mesh_keys(mesh), **KEYS, **keys), first_state(), BATCHES)


def test_bias_increases_for_underloaded_experts():
  state, rows = three_steps()
  np.testing.assert_array_equal(bias_of(state), expected_bias(bias_of(first_state()), rows))
  assert bias_of(state).dtype == np.float32
  moved_NE = bias_of(state) - bias_of(first_state())
  assert (np.abs(moved_NE) > 2 * RATE).any()
  assert all(row["expert_load"].sum() == 2 * row["expert_load"][0].sum() for row in rows)


@pytest.mark.parametrize("mesh", [MESHES[1], slow(MESHES[2])])
def test_bias_is_bitwise_equal_on_every_mesh_and_device(mesh):
  expected, _ = three_steps()
  trainer = trainer_of(**mesh_keys(mesh), **KEYS)
  state = state_on(trainer, first_state())
  for batch in BATCHES:
    state, _ = trainer.train_step(state, place(trainer, batch))
  shards = bias_of(state).addressable_shards
  assert len(shards) == 8
  for shard in shards:
    np.testing.assert_array_equal(shard.data, bias_of(expected))


def test_micro_batches_share_one_load():
  keys = {"gradient_accumulation_steps": 4, "load_balance_loss_scope": "sequence"}
  state, rows = three_steps("fsdp=4 tensor=2", **keys)
  expected, expected_rows = three_steps()
  for row, expected_row in zip(rows, expected_rows, strict=True):
    np.testing.assert_array_equal(row["expert_load"], expected_row["expert_load"])
  np.testing.assert_array_equal(bias_of(state), bias_of(expected))


@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_no_optimizer_updates_parameters_without_gradient(opt_type):
  names = {"router": {"kernel": jax.P("embed", "router"), "bias": jax.P("router")}}
  draw = np.random.default_rng(0)
  params = {"kernel": draw.normal(size=(8, 4)), "bias": draw.normal(size=4)}
  params = {"router": jax.tree.map(np.float32, params)}
  cfg = config_of(opt_type=opt_type, adam_weight_decay=0.1, learning_rate_schedule_steps=8)
  tx = build_optimizer(cfg.optimizer, names, cfg.model)
  state = tx.init(params)
  now = params
  for _ in range(3):
    gradient = {"kernel": np.float32(draw.normal(size=(8, 4))), "bias": np.zeros(4, np.float32)}
    with jax.numpy_dtype_promotion("standard"):
      updates, state = tx.update({"router": gradient}, state, now)
    now = optax.apply_updates(now, updates)
  np.testing.assert_array_equal(now["router"]["bias"], params["router"]["bias"])
  assert (now["router"]["kernel"] != params["router"]["kernel"]).all()


def test_skipped_step_leaves_the_bias_unchanged():
  trainer = trainer_of(**mesh_keys(MESHES[0]), **KEYS)
  weight_BT = BATCHES[0].weight_BT.copy()
  weight_BT[0, 0] = np.nan
  state, (row,) = take_steps(trainer, first_state(), [BATCHES[0].replace(weight_BT=weight_BT)])
  assert row["skipped"] == 1
  assert row["expert_load"].std() > 0
  np.testing.assert_array_equal(bias_of(state), bias_of(first_state()))


def test_unstacked_layers_are_matched_in_order():
  """With twelve layers, where layers_10 sorts before layers_2, and dense layers between."""
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


def test_load_becomes_balanced():
  """With a frozen router that prefers the first experts."""
  values = DEFAULTS | {"num_experts": 8, "router": "sigmoid_group_topk", "routed_bias": True}
  router = Router(build(MoeConfig, values), jnp.dtype(jnp.float32))
  draw = np.random.default_rng(0)
  x_BTD = draw.normal(size=(8, 32, 6)).astype(np.float32) + 1
  kernel_DE = draw.normal(size=(6, 8)).astype(np.float32) - np.linspace(-0.3, 0.3, 8)[None]

  @jax.jit
  def step(params):
    sums = router.apply({"params": params["router"]}, x_BTD, np.ones((8, 32), np.int32)).sums
    return move_routed_biases(params, sums.count_E[None], 0.01), sums.count_E

  params = {"router": {"kernel": kernel_DE.astype(np.float32), "bias": np.zeros(8, np.float32)}}
  loads = []
  for _ in range(200):
    params, load_E = step(params)
    loads.append(np.asarray(load_E))
  assert loads[0].max() > 2 * loads[0].mean()
  assert np.mean(loads[-10:], axis=0).max() < 1.1 * loads[0].mean()
