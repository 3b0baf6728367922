"""Bounded receive buffers that drop nothing: steps that overflow are replayed, bit for bit."""

import contextlib
import dataclasses
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import build, config_of, mesh_keys, place
from support.tiny_run import Output, expert_loads, last_manifest, logged, parameter_hash, start

from maxlite.config import Config
from maxlite.data.batch import Batch
from maxlite.layers.moe import receive_buffer
from maxlite.step.gradients import GradientResult, StepInputs
from maxlite.training.features.overflow_replay import DISCARDED
from maxlite.training.program import Program
from maxlite.training.trainer import open_trainer

LENGTH = 32
VOCAB = 264
KEYS = {
  "decoder_block": "mixtral",
  "sparse_matmul": True,
  "num_experts": 8,
  "num_experts_per_tok": 1,
  "router": "topk_softmax",
  "norm_topk_prob": "false",
  "routed_bias": True,
  "ema_decay": 0.9,
  "router_jitter": 0.1,
  "max_target_length": LENGTH,
  "per_device_batch_size": 16,
}
FACTOR = 2.5  # Which only hot batches exceed.
NUM_STEPS = 9
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_batch_size": 32}
# Two in a row, one alone, and the last.
HOT_STEPS = (1, 2, 5, 8)


@pytest.fixture(autouse=True)
def _small_buffers(monkeypatch):
  """Buffers that a tiny step can fill, with the tiles of larger ones."""
  monkeypatch.setattr(receive_buffer, "ROW_MULTIPLE", 16)


@contextlib.contextmanager
def float64():
  """Not JAX's context managers, which are of one thread: another one compiles the replays."""
  jax.config.update("jax_enable_x64", True)
  jax.config.update("jax_numpy_dtype_promotion", "standard")  # users cannot select float64
  yield
  jax.config.update("jax_enable_x64", False)
  jax.config.update("jax_numpy_dtype_promotion", "strict")


def batch_of(seed: int, num_rows: int, *, is_hot: bool) -> Batch:
  """Rows of one document; a hot batch has one token, which goes to one expert."""
  ids = np.random.default_rng(seed).integers(VOCAB, size=(num_rows, LENGTH), dtype=np.int32)
  if is_hot:
    ids = np.full_like(ids, seed)
  return Batch.of(ids)


def build_typed(dtype: str, **keys: object) -> Program:
  cfg: Config = config_of(**(KEYS | keys))
  model = dataclasses.replace(cfg.model, dtype=dtype, weight_dtype=dtype)
  return build(dataclasses.replace(cfg, model=model))


def train(program: Program) -> tuple[object, list[dict]]:
  """(state, metrics of every step) on the host after all batches."""
  trainer = open_trainer(Config(), program, program.init(0))
  metrics = []
  num_rows, _ = program.batch_shape
  for n in range(NUM_STEPS):
    batch = batch_of(n, num_rows, is_hot=n in HOT_STEPS)
    inputs = program.with_extra_inputs(place(program, batch))
    metrics.append(trainer.step(inputs))
  state = trainer.state  # which makes the metrics final
  return jax.device_get(state), jax.device_get(metrics)


def assert_same_bits(got: object, want: object) -> None:
  leaves = jax.tree_util.tree_leaves_with_path(got)
  for (path, leaf), expected in zip(leaves, jax.tree.leaves(want), strict=True):
    name = jax.tree_util.keystr(path)
    assert np.asarray(leaf).tobytes() == np.asarray(expected).tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
  ("mesh", "factor", "keys"),
  [
    ("data=2 expert=4", FACTOR, ACCUMULATED),
    ("expert=4 fsdp=2", FACTOR, {}),
    ("expert=4 tensor=2", FACTOR, {}),
    ("context=2 expert=4", FACTOR, {}),
    ("expert=8", FACTOR, {}),
    # Of two shards, none receives more than twice an even load.
    ("data=2 fsdp=2 expert=2", 1.5, {"per_device_batch_size": 64}),
  ],
)
def test_losses_and_parameters_are_those_of_the_worst_case(dtype, mesh, factor, keys, capfd):
  precisions = {"float32": contextlib.nullcontext, "float64": float64}
  with precisions[dtype]():
    keys = keys | mesh_keys(mesh)
    state, metrics = train(build_typed(dtype, **keys, ragged_buffer_factor=factor))
    expected, expected_metrics = train(build_typed(dtype, **keys))
  required = [float(of_step.pop("expert_buffer_factor")) for of_step in metrics]
  assert [n for n in range(NUM_STEPS) if required[n] > factor] == list(HOT_STEPS), required
  num_replayed = [int(of_step.pop("replayed_steps")) for of_step in metrics]
  # The steps dispatched before the host read of an overflow are replayed too.
  assert num_replayed == [0, 1, 2, 2, 2, 3, 4, 4, 5]
  assert_same_bits(metrics, expected_metrics)
  assert_same_bits(state, expected)
  assert int(state.step) == NUM_STEPS
  assert capfd.readouterr().err.count("would have sufficed; replayed") == 3


def test_one_shard_of_experts_replays_nothing():
  assert build_typed("float32", **mesh_keys("fsdp=8"), ragged_buffer_factor=FACTOR).features == ()


@pytest.mark.parametrize(
  ("dropped", "follows_discarded", "is_applied"),
  [([0.0, 0.0], False, True), ([0.0, 2.0], False, False), ([0.0, 0.0], True, False)],
)
def test_a_step_is_discarded_if_it_overflows_or_follows_one(dropped, follows_discarded, is_applied):
  program = build_typed("float32", **mesh_keys("expert=8"), ragged_buffer_factor=FACTOR)
  (feature,) = program.features

  def gradients_of(trained, frozen, collections, inputs, key):
    metrics = {"expert_dropped": jnp.array(dropped)}
    return GradientResult(trained, jnp.float32(1), metrics, collections)

  inputs = StepInputs({}, {DISCARDED: jnp.array(follows_discarded)})
  result = feature.wrap_gradients(gradients_of)({}, {}, {}, inputs, jax.random.key(0))
  assert bool(result.apply) == is_applied
  assert bool(result.metrics[DISCARDED]) == (not is_applied)
  assert float(result.loss) == 1


RUN = KEYS | {
  "ici_fsdp_parallelism": 2,
  "ici_expert_parallelism": 4,
  "gradient_accumulation_steps": 1,
  "data_shuffle_seed": 2,
}
RUN_FACTOR = 1.5625  # which steps 2, 4, 6, 7 and 8 exceed


@pytest.mark.slow
def test_a_run_resumes_with_the_bits_of_the_worst_case(folder, capfd):
  """Checkpoints, held-out losses and the end of an interrupted run wait for replays."""
  bounded = RUN | {"ragged_buffer_factor": RUN_FACTOR}
  code, _ = start(folder, Output(at=5), **bounded)
  assert code == 128 + signal.SIGTERM
  code, output = start(folder, **bounded)
  assert code == 0
  unbounded = folder.with_name(f"{folder.name}_worst_case")
  _, expected_output = start(unbounded, **RUN)

  rows = logged(folder)
  required = [row.pop("expert_buffer_factor") for row in rows]
  overflows = [factor > RUN_FACTOR for factor in required]
  assert overflows[3], f"no replay of the step before a checkpoint and evaluation: {required}"
  assert not all(overflows)
  num_replayed = [row.pop("replayed_steps") for row in rows]
  assert num_replayed[3] > num_replayed[2]
  assert "replayed step 4 without a bound" in capfd.readouterr().err
  assert rows == logged(unbounded)
  assert expert_loads(folder) == expert_loads(unbounded)
  assert last_manifest(folder) == last_manifest(unbounded)
  assert parameter_hash(output) == parameter_hash(expected_output)
