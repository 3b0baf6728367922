"""The training step: gradients, micro-batches, random keys, and non-finite batches."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slow_cases import slow
from tiny import config_of, mesh_keys, place, state_on, take_steps, trainer_of, uneven_batch

from maxlite.evaluation.held_out import compile_eval_step
from maxlite.models import Decoder
from maxlite.optim import build_schedule, with_schedule_steps
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.step.gradients import LossFunction, build_gradients
from maxlite.step.train_state import init_state
from maxlite.step.train_step import build_train_step
from maxlite.training.loss import NEXT_TOKEN, DecoderLoss
from maxlite.training.trainer import build_trainer

MESH = mesh_keys("fsdp=4 tensor=2")
BALANCED = {"z_loss_multiplier": 1e-3, "load_balance_loss_weight": 0.5, "ema_decay": 0.5}
JITTER = {"z_loss_multiplier": 1e-3, "router_jitter": 0.2, "ema_decay": 0.5}


@functools.cache
def first_state():
  return jax.device_get(trainer_of(**MESH, **BALANCED).init_state())


def start(**keys):
  """(trainer, state before the first step on the host)."""
  return trainer_of(**MESH, **keys), first_state()


@functools.cache
def steps_of_whole_batches():
  """(state, metrics of each step) after three steps without accumulation."""
  return take_steps(*start(**BALANCED), [uneven_batch(seed) for seed in range(3)])


def assert_same_steps(state, rows, expected_state, expected_rows):
  for row, expected_row in zip(rows, expected_rows, strict=True):
    assert row.keys() == expected_row.keys()
    for name, value in expected_row.items():
      np.testing.assert_allclose(row[name], value, rtol=1e-5, err_msg=name)
  for leaf, expected_leaf in zip(*map(jax.tree.leaves, (state, expected_state)), strict=True):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-6)


def with_nan(batch):
  """`batch` with a token of weight NaN."""
  weight_BT = batch.weight_BT.copy()
  weight_BT[0, 0] = np.nan
  return batch.replace(weight_BT=weight_BT)


def assert_same_bits(tree, expected):
  jax.tree.map(np.testing.assert_array_equal, tree, expected)


@pytest.mark.slow
def test_micro_batches_add_up_to_the_batch():
  """On a mesh without the data axis; the test of slices has one with it."""
  batches = [uneven_batch(seed) for seed in range(3)]
  state, rows = take_steps(*start(gradient_accumulation_steps=4, **BALANCED), batches)
  assert rows[0].keys() > {"load_balance_loss", "router_z_loss", "z_loss"}
  assert_same_steps(state, rows, *steps_of_whole_batches())


@pytest.mark.parametrize("keys", [BALANCED, slow({"decoder_block": "llama"})], ids=str)
def test_slices_accumulate_gradients_to_those_of_the_batch(keys):
  """With a loss that is not linear in its sums; contracts/test_moe_net.py has the linear ones."""
  before = jax.device_get(trainer_of(**MESH, **keys).init_state())
  batches = [uneven_batch(seed) for seed in range(3)]
  whole = trainer_of(**MESH, **keys)
  expected = steps_of_whole_batches() if keys == BALANCED else take_steps(whole, before, batches)
  mesh = mesh_keys("data=2 fsdp=2 tensor=2")
  trainer = trainer_of(**mesh, **keys, gradient_accumulation_steps=4)
  state, rows = take_steps(trainer, before, batches)
  assert rows[0].keys() >= {"z_loss", "load_balance_loss", "router_z_loss"} or keys != BALANCED
  assert_same_steps(state, rows, *expected)


class Linear(LossFunction):
  """The sum of the batch times the parameter."""

  def forward(self, params, collections, batch, key, extra):
    return jnp.sum(batch.astype(params.dtype) * params), collections

  def combine(self, sums):
    return sums, {}


def test_gradients_of_bfloat16_weights_are_accumulated_in_float32():
  weight = jnp.ones((), jnp.bfloat16)
  ones = jnp.ones(512)
  gradient, *_ = build_gradients(Linear(), 512)(weight, None, {}, ones, jax.random.key(0))
  assert (gradient.dtype, float(gradient)) == (jnp.bfloat16, 512)


def test_gradient_equals_finite_differences():
  """In float64, against central differences along random directions through all parameters."""
  cfg = trainer_of(**MESH, **BALANCED).cfg
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    model_cfg = dataclasses.replace(cfg.model, dtype="float64", weight_dtype="float64")
    ones = (1,) * len(MESH_AXES)  # contracts/test_moe_net.py compares the gradients of meshes
    model = Decoder(model_cfg, Sharder(build_mesh(ones, ones, jax.devices()[:1])))
    tx = optax.sgd(1.0)  # subtracts the gradient from the parameters
    loss = DecoderLoss(model, NEXT_TOKEN, cfg.training, model_cfg.moe)
    step = jax.jit(build_train_step(build_gradients(loss), tx))
    params = jax.tree.map(np.float64, first_state().params)
    batch = uneven_batch(0)
    batch = batch.replace(weight_BT=batch.weight_BT.astype(np.float64))
    state = init_state(params, tx.init(params), jnp.zeros(2, jnp.uint32))
    moved, _ = step(state, batch)
    gradient = jax.tree.map(np.subtract, params, jax.device_get(moved.params))
    for seed in range(3):
      draw = np.random.default_rng(seed)
      direction = jax.tree.map(lambda x, draw=draw: draw.standard_normal(x.shape), params)
      slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, gradient, direction)))
      away = (jax.tree.map(lambda x, d, h=h: x + h * d, params, direction) for h in (1e-6, -1e-6))
      up, down = (step(state.replace(params=p), batch)[1]["total_loss"] for p in away)
      np.testing.assert_allclose(slope, (up - down) / 2e-6, rtol=1e-6)


@pytest.mark.slow
def test_bfloat16_activations_give_nearly_the_same_step():
  keys = {**BALANCED, "dtype": "bfloat16", "gradient_accumulation_steps": 2}
  batches = [uneven_batch(seed) for seed in range(3)]
  _, expected_rows = steps_of_whole_batches()
  state, rows = take_steps(*start(**keys), batches)
  assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
  for row, expected_row in zip(rows, expected_rows, strict=True):
    for name in ("loss", "z_loss", "router_z_loss", "grad_norm"):
      np.testing.assert_allclose(row[name], expected_row[name], rtol=0.03, err_msg=name)
      assert row[name] != expected_row[name]


def test_nonfinite_step_changes_only_the_counters():
  trainer, before = start(**BALANCED)
  bad = with_nan(uneven_batch(0))
  good = uneven_batch(1)
  after, rows = take_steps(trainer, before, [bad, bad])
  assert not np.isfinite(rows[0]["loss"])
  assert_same_bits((after.params, after.opt_state), (before.params, before.opt_state))
  assert (after.step, after.skipped, after.skipped_in_a_row) == (2, 2, 2)
  assert [(row["skipped"], row["skipped_in_a_row"]) for row in rows] == [(1, 1), (2, 2)]
  after, (row,) = take_steps(trainer, after, [good])
  expected, (expected_row,) = take_steps(trainer, before, [good])
  assert_same_bits((after.params, after.opt_state), (expected.params, expected.opt_state))
  assert (after.step, after.skipped, after.skipped_in_a_row) == (3, 2, 0)
  assert (row["skipped"], row["skipped_in_a_row"]) == (2, 0)
  assert row["loss"] == expected_row["loss"]


def test_skipped_step_leaves_the_moving_average_unchanged():
  trainer, before = start(**BALANCED)
  bad = with_nan(uneven_batch(0))
  good = uneven_batch(1)
  moved, _ = take_steps(trainer, before, [good])
  assert any(
    (a != b).any() for a, b in zip(*map(jax.tree.leaves, (moved.ema, moved.params)), strict=True)
  )
  after, _ = take_steps(trainer, moved, [bad])
  assert after.skipped == 1
  assert_same_bits(after.ema, moved.ema)


def test_nonfinite_gradient_skips_the_step():
  trainer, before = start(**BALANCED)
  scale = np.full_like(before.params["final_norm"]["scale"], 1e15)
  huge = before.replace(params=before.params | {"final_norm": {"scale": scale}})
  after, (row,) = take_steps(trainer, huge, [uneven_batch(0)])
  assert np.isfinite(row["total_loss"])
  assert not np.isfinite(row["grad_norm"])
  assert_same_bits((after.params, after.opt_state), (huge.params, huge.opt_state))
  assert after.skipped == 1


def test_the_learning_rate_schedule_counts_updates_not_steps():
  trainer, before = start(**BALANCED)
  batch = uneven_batch(0)
  _, rows = take_steps(trainer, before, [batch, with_nan(batch), batch, batch])
  optimizer = with_schedule_steps(trainer.cfg.optimizer, trainer.cfg.run.steps)
  schedule = build_schedule(optimizer)
  expected = [float(schedule(jnp.float32(update))) for update in (0, 1, 1, 2)]
  np.testing.assert_allclose([row["learning_rate"] for row in rows], expected, rtol=1e-6)
  assert len(set(expected)) == 3


def test_router_jitter_differs_between_steps():
  trainer = trainer_of(**MESH, **JITTER)
  before = first_state()
  batch = uneven_batch(0)
  states = (before, before.replace(step=before.step + 1), before)
  losses = [take_steps(trainer, state, [batch])[1][0]["load_balance_loss"] for state in states]
  assert losses[0] == losses[2] != losses[1]


def test_evaluation_has_no_jitter_and_equals_the_training_loss():
  batch, (trainer, before) = uneven_batch(0), start(**BALANCED)
  _, (row,) = take_steps(trainer, before, [batch])
  jittery = trainer_of(**MESH, **JITTER)
  num_bytes_V = np.arange(jittery.cfg.model.vocab_size, dtype=np.int32) % 3
  eval_step = compile_eval_step(jittery, num_bytes_V)
  sums = jax.device_get(eval_step(state_on(jittery, before).params, place(jittery, batch)))
  np.testing.assert_allclose(sums["nll"] / sums["weight"], row["loss"], rtol=1e-6)
  assert sums["weight"] == np.sum(batch.weight_BT)
  assert sums["num_bytes"] == np.sum(num_bytes_V[batch.targets_BT] * (batch.weight_BT > 0))


@pytest.mark.parametrize("decoder_block", ["llama", "mixtral"])
def test_the_step_of_one_device_has_no_collectives(decoder_block):
  """XLA:CPU runs a collective of one device as a copy."""
  config = config_of(decoder_block=decoder_block, **mesh_keys("fsdp=1"))
  trainer = build_trainer(config, jax.devices()[:1])
  text = trainer.lower_step(0).as_text()
  assert "dot_general" in text
  assert not re.findall(r"stablehlo\.(?:all_|reduce_scatter|collective_)\w*", text)
