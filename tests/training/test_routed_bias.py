"""Routers' biases follow their rule for the global load, bitwise equal on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.slow_cases import fast_only
from support.tiny import config_of, mesh_keys, place, state_on, take_steps, uneven_batch

from maxlite.config.schema import DEFAULTS, MoeConfig, build
from maxlite.layers.moe.router import Router
from maxlite.optim import build_optimizer
from maxlite.registry import OPTIMIZERS
from maxlite.training.routed_bias import move_routed_biases

RATE = 0.003
KEYS = {
  "routed_bias": "true",
  "base_num_decoder_layers": 2,
  "scan_layers": True,
  "routed_bias_update_rate": RATE,
  "router": "sigmoid_group_topk",
  "adam_weight_decay": 0.1,
}
MESHES = ("fsdp=8", "data=2 context=2 tensor=2", "expert=4 fsdp=2")
BATCHES = [uneven_batch(seed) for seed in range(3)]


@pytest.fixture(scope="module")
def program(program_of):
  return program_of(**mesh_keys(MESHES[0]), **KEYS)


@pytest.fixture(scope="module")
def before(program):
  """The first state on the host, with nonzero biases, to detect weight decay."""
  state = jax.device_get(program.init(0))
  draw = np.random.default_rng(0)
  bias_NE = 0.05 * draw.normal(size=bias_of(state).shape)
  return with_bias(state, bias_NE)


def bias_of(state):
  return state.params["layers"]["moe"]["router"]["bias"]


def with_bias(state, bias_NE):
  params = jax.tree.map(lambda leaf: leaf, state.params)
  params["layers"]["moe"]["router"]["bias"] = bias_NE.astype(np.float32)
  return state.replace(params=params)


def expected_bias(bias_NE, rows):
  """The rule in numpy, from the reported loads."""
  for row in rows:
    bias_NE = bias_NE + bias_step(row["expert_load"])
  return bias_NE


def bias_step(count_NE):
  """How far biases move, up for experts with less than the mean load of their layer."""
  mean_N1 = count_NE.mean(-1, keepdims=True)
  direction_NE = np.sign(mean_N1 - count_NE)
  return np.float32(RATE) * direction_NE.astype(np.float32)


@pytest.fixture(scope="module")
def three_steps(program, before):
  """(state, metrics of each step)."""
  return take_steps(program, before, BATCHES)


def test_bias_increases_for_underloaded_experts(before, three_steps):
  state, rows = three_steps
  bias_NE = bias_of(state)
  old_bias_NE = bias_of(before)
  np.testing.assert_array_equal(bias_NE, expected_bias(old_bias_NE, rows))
  assert bias_NE.dtype == np.float32
  assert (np.abs(bias_NE - old_bias_NE) > 2 * RATE).any()
  for row in rows:
    load_N = row["expert_load"].sum(axis=1)
    assert load_N.shape == (2,)
    assert load_N[0] == load_N[1]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MESHES[1], MESHES[2]])
def test_bias_is_bitwise_equal_on_every_mesh_and_device(program_of, before, three_steps, mesh):
  expected, _ = three_steps
  program = program_of(**mesh_keys(mesh), **KEYS)
  state = state_on(program, before)
  for batch in BATCHES:
    state, _ = program.step(state, place(program, batch))
  shards = bias_of(state).addressable_shards
  assert len(shards) == 8
  for shard in shards:
    np.testing.assert_array_equal(shard.data, bias_of(expected))


@pytest.mark.slow
def test_micro_batches_share_one_load(program_of, before, three_steps):
  keys = KEYS | {"gradient_accumulation_steps": 4, "load_balance_loss_scope": "sequence"}
  program = program_of(**mesh_keys("fsdp=4 tensor=2"), **keys)
  state, rows = take_steps(program, before, BATCHES)
  expected, expected_rows = three_steps
  for row, expected_row in zip(rows, expected_rows, strict=True):
    np.testing.assert_array_equal(row["expert_load"], expected_row["expert_load"])
  np.testing.assert_array_equal(bias_of(state), bias_of(expected))


@pytest.mark.parametrize("opt_type", fast_only(OPTIMIZERS, "adamw", "lion"))
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
    kernel = np.float32(draw.normal(size=(8, 4)))
    gradient = {"kernel": kernel, "bias": np.zeros(4, np.float32)}
    with jax.numpy_dtype_promotion("standard"):
      updates, state = tx.update({"router": gradient}, state, now)
    now = optax.apply_updates(now, updates)
  np.testing.assert_array_equal(now["router"]["bias"], params["router"]["bias"])
  assert (now["router"]["kernel"] != params["router"]["kernel"]).all()


def test_skipped_step_leaves_the_bias_unchanged(program, before):
  weight_BT = BATCHES[0].weight_BT.copy()
  weight_BT[0, 0] = np.nan
  bad = BATCHES[0].replace(weight_BT=weight_BT)
  state, (row,) = take_steps(program, before, [bad])
  assert row["skipped"] == 1
  assert row["expert_load"].std() > 0
  np.testing.assert_array_equal(bias_of(state), bias_of(before))


def test_unstacked_layers_are_matched_in_order():
  """With twelve layers, where layers_10 sorts before layers_2, and dense layers between."""
  count_NE = np.random.default_rng(0).integers(0, 9, (7, 4)).astype(np.float32)
  unstacked = {f"layers_{i}": {"mlp": {"bias": np.zeros(3)}} for i in range(13)}
  with_experts = [f"layers_{i}" for i in range(0, 13, 2)]
  for name in with_experts:
    unstacked[name] = {"moe": {"router": {"bias": np.zeros(4, np.float32)}}}
  moved = move_routed_biases(unstacked, count_NE, RATE)
  stacked = {"layers": {"moe": {"router": {"bias": np.zeros((7, 4), np.float32)}}}}
  moved_stacked = move_routed_biases(stacked, count_NE, RATE)
  expected_NE = bias_step(count_NE)
  np.testing.assert_array_equal(moved_stacked["layers"]["moe"]["router"]["bias"], expected_NE)
  for name, expected_E in zip(with_experts, expected_NE, strict=True):
    np.testing.assert_array_equal(moved[name]["moe"]["router"]["bias"], expected_E)
  np.testing.assert_array_equal(moved["layers_1"]["mlp"]["bias"], 0)


def test_load_becomes_balanced():
  """With a frozen router that prefers the first experts."""
  values = DEFAULTS | {"num_experts": 8, "router": "sigmoid_group_topk", "routed_bias": True}
  router = Router(build(MoeConfig, values), jnp.dtype(jnp.float32))
  draw = np.random.default_rng(0)
  x_BTD = draw.normal(size=(8, 32, 6)).astype(np.float32) + 1
  segment_BT = np.ones((8, 32), np.int32)
  preference_E = np.linspace(0.3, -0.3, 8)
  kernel_DE = draw.normal(size=(6, 8)) + preference_E[None]

  @jax.jit
  def step(params):
    routing = router.apply({"params": params["router"]}, x_BTD, segment_BT)
    count_E = routing.sums.count_E
    return move_routed_biases(params, count_E[None], 0.01), count_E

  params = {"router": {"kernel": kernel_DE.astype(np.float32), "bias": np.zeros(8, np.float32)}}
  loads = []
  for _ in range(200):
    params, load_E = step(params)
    loads.append(np.asarray(load_E))
  first_E = loads[0]
  last_E = np.mean(loads[-10:], axis=0)
  assert first_E.max() > 2 * first_E.mean()
  assert last_E.max() < 1.1 * first_E.mean()
