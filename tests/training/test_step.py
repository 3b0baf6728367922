"""The training step: gradients, micro-batches, random keys, and non-finite batches."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.tiny import (
  assert_same_steps,
  build,
  config_of,
  mesh_keys,
  place,
  state_on,
  take_steps,
  uneven_batch,
)

from maxlite.evaluation.held_out import compile_eval_step
from maxlite.models import Decoder
from maxlite.optim import build_schedule
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.step.gradients import GradientResult, LossFunction, build_gradients
from maxlite.step.train_state import init_state
from maxlite.step.train_step import build_train_step
from maxlite.training.loss import NEXT_TOKEN, DecoderLoss

MESH = mesh_keys("fsdp=4 tensor=2")
BALANCED = {"z_loss_multiplier": 1e-3, "load_balance_loss_weight": 0.5, "ema_decay": 0.5}
JITTER = {"z_loss_multiplier": 1e-3, "router_jitter": 0.2, "ema_decay": 0.5}


@pytest.fixture(scope="module")
def program(program_of):
  return program_of(**MESH, **BALANCED)


@pytest.fixture(scope="module")
def before(program):
  """The state before the first step, on the host."""
  return jax.device_get(program.init(0))


@pytest.fixture(scope="module")
def three_steps(program, before):
  """(state, metrics of each step) after three steps without accumulation."""
  return take_steps(program, before, [uneven_batch(seed) for seed in range(3)])


def with_nan(batch):
  """`batch` with a token of weight NaN."""
  weight_BT = batch.weight_BT.copy()
  weight_BT[0, 0] = np.nan
  return batch.replace(weight_BT=weight_BT)


def assert_same_weights(got, want):
  """Assert that parameters and optimizer state are equal bit for bit."""
  trees.assert_equal_leaves(got.params, want.params)
  trees.assert_equal_leaves(got.opt_state, want.opt_state)


def assert_counts(counts, *, skipped, skipped_in_a_row):
  """Assert the numbers of skipped steps in a state or in metrics."""
  assert counts["skipped"] == skipped
  assert counts["skipped_in_a_row"] == skipped_in_a_row


@pytest.mark.slow
def test_micro_batches_add_up_to_the_batch(program_of, before, three_steps):
  """On a mesh without the data axis; the test of slices has one with it."""
  program = program_of(**MESH, **BALANCED, gradient_accumulation_steps=4)
  state, rows = take_steps(program, before, [uneven_batch(seed) for seed in range(3)])
  assert rows[0].keys() > {"load_balance_loss", "router_z_loss", "z_loss"}
  assert_same_steps((state, rows), three_steps)


SLICES = mesh_keys("data=2 fsdp=2 tensor=2") | {"gradient_accumulation_steps": 4}


@pytest.mark.slow
def test_slices_accumulate_gradients_to_those_of_the_batch(program_of, before, three_steps):
  """With a loss that is not linear in its sums; contracts/test_moe_net.py has the linear ones."""
  program = program_of(**SLICES, **BALANCED)
  state, rows = take_steps(program, before, [uneven_batch(seed) for seed in range(3)])
  assert rows[0].keys() >= {"z_loss", "load_balance_loss", "router_z_loss"}
  assert_same_steps((state, rows), three_steps)


@pytest.mark.slow
def test_slices_accumulate_gradients_of_a_dense_model(program_of):
  whole = program_of(**MESH, decoder_block="llama")
  before = jax.device_get(whole.init(0))
  batches = [uneven_batch(seed) for seed in range(3)]
  expected = take_steps(whole, before, batches)
  program = program_of(**SLICES, decoder_block="llama")
  assert_same_steps(take_steps(program, before, batches), expected)


class Linear(LossFunction):
  """The sum of the batch times the parameter."""

  def forward(self, params, collections, batch, key, extra):
    return jnp.sum(batch.astype(params.dtype) * params), collections

  def combine(self, sums):
    return sums, {}


def test_gradients_of_bfloat16_weights_are_accumulated_in_float32():
  weight = jnp.ones((), jnp.bfloat16)
  ones = jnp.ones(512)
  compute = build_gradients(Linear(), 512)
  gradient, *_ = compute(weight, None, {}, ones, jax.random.key(0))
  assert gradient.dtype == jnp.bfloat16
  assert float(gradient) == 512


class Noise(LossFunction):
  """Random numbers times the parameter, and the numbers' squares."""

  def forward(self, params, collections, batch, key, extra):
    noise = jax.random.normal(key)
    return (noise * params, noise**2), collections

  def combine(self, sums):
    total, squares = sums
    return total, {"squares": squares}


def test_micro_batches_draw_different_random_numbers():
  compute = build_gradients(Noise(), 4)
  result = compute(jnp.ones(()), None, {}, jnp.ones(4), jax.random.key(0))
  sum_of_equal_draws = np.sqrt(4 * result.metrics["squares"])
  assert abs(result.gradients) < 0.99 * sum_of_equal_draws


def test_gradient_equals_finite_differences(program, before):
  """In float64, against central differences along random directions through all parameters."""
  cfg = program.spec
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    model_cfg = dataclasses.replace(cfg.model, dtype="float64", weight_dtype="float64")
    ones = (1,) * len(MESH_AXES)  # contracts/test_moe_net.py compares the gradients of meshes
    model = Decoder(model_cfg, Sharder(build_mesh(ones, ones, jax.devices()[:1])))
    tx = optax.sgd(1.0)  # subtracts the gradient from the parameters
    loss = DecoderLoss(model, NEXT_TOKEN, cfg.training, model_cfg.moe)
    step = jax.jit(build_train_step(build_gradients(loss), tx))
    params = jax.tree.map(np.float64, before.params)
    batch = uneven_batch(0)
    batch = batch.replace(weight_BT=batch.weight_BT.astype(np.float64))
    state = init_state(params, tx.init(params), jnp.zeros(2, jnp.uint32))
    moved, _ = step(state, batch)
    gradient = jax.tree.map(np.subtract, params, jax.device_get(moved.params))

    def loss_at(distance, direction):
      away = jax.tree.map(lambda x, d: x + distance * d, params, direction)
      _, metrics = step(state.replace(params=away), batch)
      return metrics["total_loss"]

    for seed in range(3):
      draw = np.random.default_rng(seed)
      direction = jax.tree.map(lambda x, draw=draw: draw.standard_normal(x.shape), params)
      slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, gradient, direction)))
      rise = loss_at(1e-6, direction) - loss_at(-1e-6, direction)
      np.testing.assert_allclose(slope, rise / 2e-6, rtol=1e-6)


@pytest.mark.slow
def test_bfloat16_activations_give_nearly_the_same_step(program_of, before, three_steps):
  keys = {**BALANCED, "dtype": "bfloat16", "gradient_accumulation_steps": 2}
  program = program_of(**MESH, **keys)
  state, rows = take_steps(program, before, [uneven_batch(seed) for seed in range(3)])
  _, expected_rows = three_steps
  assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}
  for row, expected_row in zip(rows, expected_rows, strict=True):
    for name in ("loss", "z_loss", "router_z_loss", "grad_norm"):
      np.testing.assert_allclose(row[name], expected_row[name], rtol=0.03, err_msg=name)
      assert row[name] != expected_row[name]


def test_nonfinite_step_changes_only_the_counters(program, before):
  bad = with_nan(uneven_batch(0))
  good = uneven_batch(1)
  after, (first_row, second_row) = take_steps(program, before, [bad, bad])
  assert not np.isfinite(first_row["loss"])
  assert_same_weights(after, before)
  assert after.step == 2
  assert_counts(vars(after), skipped=2, skipped_in_a_row=2)
  assert_counts(first_row, skipped=1, skipped_in_a_row=1)
  assert_counts(second_row, skipped=2, skipped_in_a_row=2)
  after, (row,) = take_steps(program, after, [good])
  expected, (expected_row,) = take_steps(program, before, [good])
  assert_same_weights(after, expected)
  assert after.step == 3
  assert_counts(vars(after), skipped=2, skipped_in_a_row=0)
  assert_counts(row, skipped=2, skipped_in_a_row=0)
  assert row["loss"] == expected_row["loss"]


def test_skipped_step_leaves_the_moving_average_unchanged(program, before):
  bad = with_nan(uneven_batch(0))
  good = uneven_batch(1)
  moved, _ = take_steps(program, before, [good])
  assert any(np.any(a != b) for a, b in trees.leaf_pairs(moved.ema, moved.params))
  after, _ = take_steps(program, moved, [bad])
  assert after.skipped == 1
  trees.assert_equal_leaves(after.ema, moved.ema)


def test_nonfinite_gradient_skips_the_step(program, before):
  scale = np.full_like(before.params["final_norm"]["scale"], 1e15)
  huge = before.replace(params=before.params | {"final_norm": {"scale": scale}})
  after, (row,) = take_steps(program, huge, [uneven_batch(0)])
  assert np.isfinite(row["total_loss"])
  assert not np.isfinite(row["grad_norm"])
  assert_same_weights(after, huge)
  assert after.skipped == 1


def test_the_learning_rate_schedule_counts_updates_not_steps(program, before):
  batch = uneven_batch(0)
  _, rows = take_steps(program, before, [batch, with_nan(batch), batch, batch])
  schedule = build_schedule(program.objectives[0].spec.optimizer)
  expected = [float(schedule(jnp.float32(update))) for update in (0, 1, 1, 2)]
  np.testing.assert_allclose([row["learning_rate"] for row in rows], expected, rtol=1e-6)
  assert len(set(expected)) == 3


@pytest.mark.slow
def test_router_jitter_differs_between_steps(program_of, before):
  program = program_of(**MESH, **JITTER)

  def balance_loss(step):
    _, (row,) = take_steps(program, before.replace(step=step), [uneven_batch(0)])
    return row["load_balance_loss"]

  loss = balance_loss(before.step)
  assert balance_loss(before.step) == loss
  assert balance_loss(before.step + 1) != loss


@pytest.mark.slow
def test_evaluation_has_no_jitter_and_equals_the_training_loss(program_of, program, before):
  batch = uneven_batch(0)
  _, (row,) = take_steps(program, before, [batch])
  jittery = program_of(**MESH, **JITTER)
  num_bytes_V = np.arange(jittery.spec.model.vocab_size, dtype=np.int32) % 3
  eval_step = compile_eval_step(jittery, num_bytes_V)
  params = state_on(jittery, before).params
  sums = jax.device_get(eval_step(params, place(jittery, batch)))
  np.testing.assert_allclose(sums["nll"] / sums["weight"], row["loss"], rtol=1e-6)
  assert sums["weight"] == np.sum(batch.weight_BT)
  targets = batch.targets_BT[batch.weight_BT > 0]
  assert sums["num_bytes"] == np.sum(num_bytes_V[targets])


@pytest.mark.parametrize("decoder_block", ["llama", "mixtral"])
def test_the_step_of_one_device_has_no_collectives(decoder_block):
  """XLA:CPU runs a collective of one device as a copy."""
  config = config_of(decoder_block=decoder_block, **mesh_keys("fsdp=1"))
  program = build(config, jax.devices()[:1])
  text = program.lower(program.objectives[0]).as_text()
  assert "dot_general" in text
  assert not re.findall(r"stablehlo\.(?:all_|reduce_scatter|collective_)\w*", text)


def test_weights_without_a_gradient_decay():
  """Such as those of experts without a token."""
  gradients = {"w": jnp.array([1.0, 0.0])}
  tx = optax.adamw(0.1, weight_decay=0.5)
  params = {"w": jnp.ones(2)}

  def gradients_of(trained, frozen, collections, inputs, key):
    return GradientResult(gradients, jnp.float32(1), {}, None)

  step = build_train_step(gradients_of, tx)
  state = init_state(params, tx.init(params), jax.random.key_data(jax.random.key(0)))
  after, _ = step(state, None)
  np.testing.assert_allclose(after.params["w"], [1 - 0.1 - 0.05, 1 - 0.05], rtol=1e-6)
