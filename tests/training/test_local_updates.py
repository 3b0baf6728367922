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
from host_runs import run
from tiny import LENGTH, ROWS, VOCAB, config_of, mesh_keys, place
from tiny_run import Output, keys_in, logged, parameter_hash, start, trainer_with_shared_programs

from maxlite.checkpoint.checksum import tree_hash
from maxlite.config import UserError, load_config
from maxlite.config.schema import LocalUpdatesConfig
from maxlite.data.batch import Batch
from maxlite.planning.comm_estimate import estimate_collectives
from maxlite.planning.plan_target import PlanTarget
from maxlite.runs.open_run import open_weights
from maxlite.sharding import build_mesh
from maxlite.step.gradients import LossFunction, build_gradients
from maxlite.step.train_state import init_state
from maxlite.step.train_step import build_train_step
from maxlite.training.trainer import build_trainer
from maxlite.training.transforms.local_updates import OuterOptimizer

RATE = 0.5
MOMENTUM = 0.6
PERIOD = 3
DENSE = {"decoder_block": "llama", "base_num_decoder_layers": 1}
MOE = {"router_jitter": 0, "load_balance_loss_weight": 0, "gradient_accumulation_steps": 2}
RUN = {"gradient_accumulation_steps": 1, "ema_decay": 0, "router_jitter": 0, "eval_interval": 3}
RUN |= DENSE | {"steps": 2 * PERIOD, "learning_rate_schedule_steps": 2 * PERIOD}
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
    return (jnp.sum(error**2), jnp.asarray(error.shape[0], error.dtype)), collections

  def combine(self, sums):
    return sums[0] / sums[1], {"loss": sums[0] / sums[1], "num_tokens": sums[1]}


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_one_local_step_of_sgd_is_data_parallelism_in_float64(num_replicas):
  draw = np.random.default_rng(0)
  batches = [{"x": draw.normal(size=(8, 5)), "y": draw.normal(size=(8, 2))} for _ in range(5)]
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    tx = optax.sgd(0.1)
    params = {"w": jnp.asarray(draw.normal(size=(5, 2)))}
    state = init_state(params, tx.init(params), jax.random.key_data(jax.random.key(0)))
    solo_step = build_train_step(build_gradients(SquaredError()), tx)
    mesh = build_mesh((num_replicas, 1, 1, 1, 1, 1), (1,) * 6, jax.devices()[:num_replicas])
    outer = OuterOptimizer(LocalUpdatesConfig(1, diloco_outer_lr=1, diloco_outer_momentum=0), mesh)
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
  trainer, expected, solo_step = with_sgd(**mesh_keys(without), **keys)
  first = jax.device_get(state.params)
  for seed in range(3):
    batch = full_batch(seed)
    state, metrics = step(state, batch)
    expected, solo_metrics = solo_step(expected, place(trainer, batch))
    for name in ("loss", "num_tokens"):
      np.testing.assert_allclose(metrics[name], solo_metrics[name], rtol=1e-6)
  assert_close(state.params, expected.params, first)


def with_sgd(**keys):
  """(trainer, state, step) of a run whose optimizer is plain SGD."""
  trainer = build_trainer(config_of(**keys))
  objective = dataclasses.replace(trainer.objectives[0], tx=optax.sgd(RATE))
  trainer = dataclasses.replace(trainer, objectives=[objective])
  everywhere = jax.sharding.NamedSharding(trainer.mesh, jax.P())
  state = jax.jit(trainer.init, out_shardings=everywhere)(np.uint32(0))
  return trainer, state, jax.jit(trainer.build_step())


def assert_close(params, expected, first):
  """Every leaf is where it is expected, within 2e-5 of its largest movement and rounding."""
  for own, there, before in zip(*map(jax.tree.leaves, (params, expected, first)), strict=True):
    moved = np.max(np.abs(there - before))
    assert moved > 0
    np.testing.assert_allclose(own, there, rtol=0, atol=2e-5 * moved + 3e-7 * np.max(np.abs(there)))


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
def trainer(runs_folder):
  return trainer_with_shared_programs(config_of(**keys_in(runs_folder, **LOCAL)))


def test_replicas_are_solo_runs_on_their_rows_joined_by_nesterov_steps(trainer, runs_folder):
  """Against solo runs on half of the rows, whose own optimizers continue through outer steps."""
  keys = keys_in(runs_folder, **RUN) | mesh_keys("fsdp=8") | {"global_batch_size": ROWS // 2}
  solo = trainer_with_shared_programs(config_of(**keys))
  state = trainer.init_state()
  alone = [solo.init_state() for _ in range(2)]
  start = first = jax.device_get(state.params)
  momentum = jax.tree.map(np.zeros_like, start)
  for n in range(1, 2 * PERIOD + 1):
    batch = full_batch(n)
    state, _ = trainer.train_step(state, place(trainer, batch))
    for r, rows in enumerate((slice(0, ROWS // 2), slice(ROWS // 2, ROWS))):
      half = jax.tree.map(lambda leaf, rows=rows: leaf[rows], batch)
      alone[r], _ = solo.train_step(alone[r], place(solo, half))
    own = [jax.device_get(each.params) for each in alone]
    if n % PERIOD == 0:
      gradient = jax.tree.map(lambda s, a, b: s - (a + b) / 2, start, *own)
      momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, momentum, gradient)
      expected = jax.tree.map(
        lambda s, g, m: s - RATE * (g + MOMENTUM * m), start, gradient, momentum
      )
      start = jax.device_get(state.params)
      assert_close(start, expected, first)
      own = [start, start]
      placed = [jax.device_put(start, solo.state_shardings.params) for _ in alone]
      alone = [each.replace(params=params) for each, params in zip(alone, placed, strict=True)]
    else:
      jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), start)
    for r in range(2):
      stacked = jax.device_get(state.opt_state.replicas.params)
      assert_close(jax.tree.map(lambda leaf, r=r: leaf[r], stacked), own[r], first)
  assert int(state.step) == 2 * PERIOD


def test_a_replica_that_is_not_finite_is_left_out_and_restarted(trainer):
  state = trainer.init_state()
  for n in range(PERIOD - 1):
    state, _ = trainer.train_step(state, place(trainer, full_batch(n)))
  broken = dict(state.opt_state.replicas.params)
  name = next(iter(broken))
  broken[name] = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), broken[name])
  replicas = state.opt_state.replicas.replace(params=broken)
  state = state.replace(opt_state=state.opt_state.replace(replicas=replicas))
  state = jax.device_put(state, trainer.state_shardings)
  start = jax.device_get(state.params)
  state, metrics = trainer.train_step(state, place(trainer, full_batch(PERIOD)))
  assert metrics["skipped"] >= 1
  replicas = jax.device_get(state.opt_state.replicas)
  for leaf, stacked, before in zip(
    *map(jax.tree.leaves, (jax.device_get(state.params), replicas.params, start)), strict=True
  ):
    assert np.all(np.isfinite(leaf))
    assert np.any(leaf != before)
    for own in stacked:
      np.testing.assert_array_equal(own, leaf)


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
  assert logged(folder) == logged(local_run[0])
  assert parameter_hash(output) == parameter_hash(local_run[1])
  assert last_leaves(folder) == last_leaves(local_run[0])


def last_leaves(folder):
  """Checksums of all arrays after the last step."""
  path = folder / f"run/checkpoints/{2 * PERIOD}/manifest/metadata"
  return json.loads(path.read_text())["body"]["leaves"]


def test_one_model_comes_out_which_loads_on_any_mesh(local_run):
  cfg = config_of(**keys_in(local_run[0], **RUN | OUTER))
  trainer, params, _, step = open_weights(cfg)
  assert (step, trainer.mesh.shape["ensemble"]) == (2 * PERIOD, 1)
  assert tree_hash(params)[:16] == parameter_hash(local_run[1])


def test_the_plan_divides_what_replicas_exchange_by_the_period(trainer):
  target = PlanTarget(trainer, "cpu", slices={"ensemble": 2})
  found = [c for c in estimate_collectives(target) if "ensemble" in c.mesh_axes]
  assert all(c.between_slices for c in found)
  shards = sum(math.prod(p.shape) / p.num_shards for p in trainer.parameter_shardings)
  exchanged = sum(c.sent_bytes for c in found) * PERIOD
  np.testing.assert_allclose(exchanged, 4 * shards, rtol=0.02)  # without the smallest arrays


@pytest.mark.slow
def test_replicas_on_two_hosts_equal_those_on_one(folder):
  keys = RUN | OUTER | mesh_keys("ensemble=2") | {"global_batch_size": 8}
  two = run(folder / "two", processes=2, devices=1, **keys)
  one = run(folder / "one", processes=1, devices=2, **keys)
  assert parameter_hash(two.splitlines()[-1]) == parameter_hash(one.splitlines()[-1])
  assert last_leaves(folder / "two") == last_leaves(folder / "one")
