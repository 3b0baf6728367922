"""Local-update training (DiLoCo): exactness, replicas, outer steps and resumption."""

import dataclasses
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import trees
from support.host_runs import run
from support.slow_cases import slow
from support.tiny import LENGTH, ROWS, VOCAB, build, config_of, mesh_keys, place
from support.tiny_run import Output, keys_in, logged, parameter_hash, shared_program, start

from maxlite.checkpoint.checksum import tree_hash
from maxlite.config import load_config
from maxlite.config.schema import LocalUpdatesConfig
from maxlite.data.batch import Batch
from maxlite.errors import UserError
from maxlite.planning.comm_estimate import estimate_collectives
from maxlite.planning.plan_target import PlanTarget
from maxlite.runs.open_run import open_weights
from maxlite.sharding import build_mesh
from maxlite.step.gradients import LossFunction, build_gradients
from maxlite.step.train_state import init_state
from maxlite.step.train_step import build_train_step
from maxlite.training.features.local_updates import OuterOptimizer
from maxlite.training.program import build_objective_step, shardings_of
from maxlite.training.spec import spec_of

RATE = 0.5
MOMENTUM = 0.6
PERIOD = 3
DENSE = {"decoder_block": "llama", "base_num_decoder_layers": 1}
MOE = {"router_jitter": 0, "load_balance_loss_weight": 0, "gradient_accumulation_steps": 2}
RUN = DENSE | {
  "gradient_accumulation_steps": 1,
  "ema_decay": 0,
  "router_jitter": 0,
  "eval_interval": 3,
  "steps": 2 * PERIOD,
  "learning_rate_schedule_steps": 2 * PERIOD,
}
OUTER = {"diloco_sync_period": PERIOD, "diloco_outer_lr": RATE, "diloco_outer_momentum": MOMENTUM}
LOCAL = RUN | OUTER | mesh_keys("ensemble=2 fsdp=4")


def full_batch(seed: int) -> Batch:
  """Rows that all have the same number of tokens, so replicas weigh the same."""
  ids = np.random.default_rng(seed).integers(VOCAB, size=(ROWS, LENGTH + 1), dtype=np.int32)
  ones = np.ones((ROWS, LENGTH), np.int32)
  position = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ones.shape)
  return Batch(ids[:, :-1], ids[:, 1:], ones, position, ones.astype(np.float32))


class SquaredError(LossFunction):
  """Of a linear map, in the type of the batch."""

  def forward(self, params, collections, batch, key, extra):
    error = batch["x"] @ params["w"] - batch["y"]
    num_rows = jnp.asarray(error.shape[0], error.dtype)
    return (jnp.sum(error**2), num_rows), collections

  def combine(self, sums):
    error_sum, num_rows = sums
    loss = error_sum / num_rows
    return loss, {"loss": loss, "num_tokens": num_rows}


@pytest.mark.parametrize("num_replicas", [slow(1), 4])
def test_one_local_step_of_sgd_is_data_parallelism_in_float64(num_replicas):
  draw = np.random.default_rng(0)
  batches = []
  for _ in range(5):
    x = draw.normal(size=(8, 5))
    y = draw.normal(size=(8, 2))
    batches.append({"x": x, "y": y})
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    tx = optax.sgd(0.1)
    params = {"w": jnp.asarray(draw.normal(size=(5, 2)))}
    key = jax.random.key_data(jax.random.key(0))
    state = init_state(params, tx.init(params), key)
    solo_step = build_train_step(build_gradients(SquaredError()), tx)
    mesh = build_mesh((num_replicas, 1, 1, 1, 1, 1), (1,) * 6, jax.devices()[:num_replicas])
    cfg = LocalUpdatesConfig(1, diloco_outer_lr=1, diloco_outer_momentum=0)
    outer = OuterOptimizer(cfg, mesh)
    step = jax.jit(outer.wrap_step(solo_step))
    local = outer.start(state)
    for batch in batches:
      state, expected = solo_step(state, batch)
      local, metrics = step(local, batch)
      np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-13)
    np.testing.assert_allclose(local.params["w"], state.params["w"], rtol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "without", "keys"),
  [
    ("ensemble=4 fsdp=2", "data=4 fsdp=2", DENSE),
    ("ensemble=2 data=2 expert=2", "fsdp=2 data=2 expert=2", MOE),
    ("ensemble=2 data=2 expert=2", "fsdp=2 data=2 expert=2", MOE | {"sparse_matmul": True}),
  ],
)
def test_one_local_step_of_sgd_is_data_parallelism_of_decoders(mesh, without, keys):
  """Also with a shard_map over `data`, and one over `expert`, inside that over the replicas."""
  outer = {"diloco_sync_period": 1, "diloco_outer_lr": 1, "diloco_outer_momentum": 0}
  _, state, step = with_sgd(**mesh_keys(mesh), **keys, **outer)
  program, expected, solo_step = with_sgd(**mesh_keys(without), **keys)
  first = jax.device_get(state.params)
  for seed in range(3):
    batch = full_batch(seed)
    state, metrics = step(state, batch)
    expected, solo_metrics = solo_step(expected, place(program, batch))
    for name in ("loss", "num_tokens"):
      np.testing.assert_allclose(metrics[name], solo_metrics[name], rtol=1e-6)
  assert_close(state.params, expected.params, first)


def with_sgd(**keys):
  """(program, state, step) of a run whose optimizer is plain SGD."""
  program = build(config_of(**keys))
  # A schedule, because the step reports the learning rate by its count.
  sgd = optax.sgd(optax.constant_schedule(RATE))
  objective = dataclasses.replace(program.objectives[0], tx=sgd)
  program = dataclasses.replace(program, objectives=(objective,))
  everywhere = jax.sharding.NamedSharding(program.mesh, jax.P())
  state = jax.device_put(program.init(0), everywhere)
  return program, state, jax.jit(program.build_joint_step())


def assert_close(params, expected, first):
  """Every leaf is where it is expected, within 2e-5 of its largest movement and rounding."""

  def assert_leaf_close(own, there, before):
    moved = np.max(np.abs(there - before))
    assert moved > 0
    largest = np.max(np.abs(there))
    np.testing.assert_allclose(own, there, rtol=0, atol=2e-5 * moved + 3e-7 * largest)

  jax.tree.map(assert_leaf_close, params, expected, first)


@pytest.mark.parametrize(
  ("keys", "fix"),
  [
    ("diloco_sync_period=7 steps=20", "write steps=21"),
    ("diloco_outer_momentum=0.5", "write diloco_sync_period=100, or diloco_outer_momentum=0.9"),
    ("diloco_sync_period=5 diloco_outer_momentum=1", "write diloco_outer_momentum=0.9"),
    ("diloco_sync_period=5 members=[{}]", "write members=[] or diloco_sync_period=0"),
    ('diloco_sync_period=5 search={"sampler":"tpe"}', "write search={} or diloco_sync_period=0"),
    ("diloco_sync_period=5 ema_decay=0.9", "write ema_decay=0.0 or diloco_sync_period=0"),
    ("diloco_sync_period=5 capacity_factor=2 sparse_matmul=false", "write capacity_factor=-1"),
  ],
)
def test_keys_that_do_not_fit_replicas_are_one_line(keys, fix):
  with pytest.raises(UserError, match=re.escape(fix)):
    load_config(["dataset_type=synthetic", *keys.split()])


@pytest.fixture(scope="module")
def program(runs_folder):
  return shared_program(spec_of(config_of(**keys_in(runs_folder, **LOCAL))))


class NesterovSteps:
  """The outer steps of two replicas in NumPy, as in the paper."""

  def __init__(self, params):
    self.params = params
    self.momentum = jax.tree.map(np.zeros_like, params)

  def take(self, own_first, own_second):
    """Take a step given the parameters of both replicas; returns the new parameters."""

    def gradient_of(before, first, second):
      return before - (first + second) / 2

    def accumulate(momentum, gradient):
      return MOMENTUM * momentum + gradient

    def move(before, gradient, momentum):
      return before - RATE * (gradient + MOMENTUM * momentum)

    gradient = jax.tree.map(gradient_of, self.params, own_first, own_second)
    self.momentum = jax.tree.map(accumulate, self.momentum, gradient)
    return jax.tree.map(move, self.params, gradient, self.momentum)


class SoloRun:
  """A run on half of the rows, whose optimizer continues through outer steps."""

  def __init__(self, program, rows):
    self.program = program
    self.rows = rows
    self.state = program.init(0)

  def step(self, batch):
    half = jax.tree.map(lambda leaf: leaf[self.rows], batch)
    self.state, _ = self.program.step(self.state, place(self.program, half))

  @property
  def params(self):
    return jax.device_get(self.state.params)

  def set_params(self, params):
    placed = jax.device_put(params, shardings_of(self.program.abstract_state).params)
    self.state = self.state.replace(params=placed)


def test_replicas_are_solo_runs_on_their_rows_joined_by_nesterov_steps(program, runs_folder):
  keys = keys_in(runs_folder, **RUN) | mesh_keys("fsdp=8") | {"global_batch_size": ROWS // 2}
  solo_program = shared_program(spec_of(config_of(**keys)))
  solo_runs = [
    SoloRun(solo_program, slice(0, ROWS // 2)),
    SoloRun(solo_program, slice(ROWS // 2, ROWS)),
  ]
  state = program.init(0)
  first = jax.device_get(state.params)
  outer = NesterovSteps(first)
  for n in range(1, 2 * PERIOD + 1):
    batch = full_batch(n)
    state, _ = program.step(state, place(program, batch))
    params = jax.device_get(state.params)
    for solo in solo_runs:
      solo.step(batch)
    if n % PERIOD == 0:
      expected = outer.take(solo_runs[0].params, solo_runs[1].params)
      assert_close(params, expected, first)
      outer.params = params
      for solo in solo_runs:
        solo.set_params(params)
    else:
      trees.assert_equal_leaves(params, outer.params)
    replicas = jax.device_get(state.opt_state.replicas.params)
    for r, solo in enumerate(solo_runs):
      own = jax.tree.map(lambda leaf, r=r: leaf[r], replicas)
      assert_close(own, solo.params, first)
  assert int(state.step) == 2 * PERIOD


def test_replicas_may_have_a_constant_rate():
  program = build(config_of(**LOCAL, lr_schedule_type="constant", warmup_steps_fraction=0))
  (objective,) = program.objectives
  step = build_objective_step(program, objective)
  _, metrics = jax.eval_shape(step, program.abstract_state, program.abstract_inputs(objective))
  assert metrics["learning_rate"].shape == ()


def test_a_replica_that_is_not_finite_is_left_out_and_restarted(program):
  state = program.init(0)
  for n in range(PERIOD - 1):
    state, _ = program.step(state, place(program, full_batch(n)))
  broken = dict(state.opt_state.replicas.params)
  name = next(iter(broken))
  broken[name] = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), broken[name])
  replicas = state.opt_state.replicas.replace(params=broken)
  state = state.replace(opt_state=state.opt_state.replace(replicas=replicas))
  state = jax.device_put(state, shardings_of(program.abstract_state))
  start = jax.device_get(state.params)
  state, metrics = program.step(state, place(program, full_batch(PERIOD)))
  assert metrics["skipped"] >= 1

  def assert_restarted(leaf, replicas, before):
    assert np.all(np.isfinite(leaf))
    assert np.any(leaf != before)
    for own in replicas:
      np.testing.assert_array_equal(own, leaf)

  params = jax.device_get(state.params)
  replicas = jax.device_get(state.opt_state.replicas.params)
  jax.tree.map(assert_restarted, params, replicas, start)


@pytest.fixture(scope="module")
def local_run(runs_folder):
  """(folder, output) of an uninterrupted run."""
  folder = runs_folder / "local_updates"
  code, output = start(folder, **LOCAL)
  assert code == 0, output
  return folder, output


def test_a_run_stopped_within_a_period_resumes_bit_for_bit(local_run, folder):
  code, _ = start(folder, Output(at=PERIOD + 1), **LOCAL)
  assert code == 128 + 15
  _, output = start(folder, **LOCAL)
  assert re.search("resuming from the checkpoint of step [45]", output)
  whole_folder, whole_output = local_run
  assert logged(folder) == logged(whole_folder)
  assert parameter_hash(output) == parameter_hash(whole_output)
  assert last_leaves(folder) == last_leaves(whole_folder)


def last_leaves(folder):
  """Checksums of all arrays after the last step."""
  path = folder / f"run/checkpoints/{2 * PERIOD}/manifest/metadata"
  return json.loads(path.read_text())["body"]["leaves"]


@pytest.mark.slow
def test_one_model_comes_out_which_loads_on_any_mesh(local_run):
  folder, output = local_run
  cfg = config_of(**keys_in(folder, **RUN | OUTER))
  program, params, _, step = open_weights(cfg)
  assert step == 2 * PERIOD
  assert program.mesh.shape["ensemble"] == 1
  assert tree_hash(params)[:16] == parameter_hash(output)


def test_the_plan_divides_what_replicas_exchange_by_the_period(program):
  target = PlanTarget(config_of(), program, "cpu", slices={"ensemble": 2})
  sent_bytes = 0
  for collective in estimate_collectives(target):
    if "ensemble" in collective.mesh_axes:
      assert collective.between_slices
      sent_bytes += collective.sent_bytes
  shard_size = 0
  for placement in program.parameters:
    shard_size += math.prod(placement.shape) / placement.num_shards
  # Without the smallest arrays.
  np.testing.assert_allclose(sent_bytes * PERIOD, 4 * shard_size, rtol=0.02)


@pytest.mark.slow
def test_replicas_on_two_hosts_equal_those_on_one(folder):
  keys = RUN | OUTER | mesh_keys("ensemble=2") | {"global_batch_size": 8}
  two = run(folder / "two", processes=2, devices=1, **keys)
  one = run(folder / "one", processes=1, devices=2, **keys)
  assert parameter_hash(two.splitlines()[-1]) == parameter_hash(one.splitlines()[-1])
  assert last_leaves(folder / "two") == last_leaves(folder / "one")
