"""The tiny model of the training tests, and batches with difficult shapes."""

import contextlib
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from support import trees

from maxlite.config import Config, load_config
from maxlite.data.batch import Batch, to_global
from maxlite.data.packing import pad_row
from maxlite.training.program import Program, build_program
from maxlite.training.spec import spec_of

VOCAB = 264
LENGTH = 16
ROWS = 16
KEYS = {
  "dataset_type": "synthetic",
  "vocab_size": VOCAB,
  "base_emb_dim": 16,
  # One layer that is not scanned compiles in three quarters of the time of two that are.
  "base_num_decoder_layers": 1,
  "scan_layers": False,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 32,
  "num_experts": 4,
  "base_moe_mlp_dim": 16,
  # Fastest to compile; contracts/test_moe_net.py covers the other dispatches.
  "sparse_matmul": False,
  "max_target_length": LENGTH,
  "per_device_batch_size": ROWS // 8,
  "logits_chunk_tokens": 24,
  "steps": 8,
  "warmup_steps_fraction": 0.5,
  # As large as the gradients, so updates are smooth in the gradient and depend on its scale.
  "adam_eps": 1e-2,
  "gradient_clipping_threshold": 0,
  "sharding_tolerance": 1,
  "jax_cache_dir": "",
}


def config_of(**keys: object) -> Config:
  return load_config([f"{name}={value}" for name, value in (KEYS | keys).items()])


def build(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Program:
  """The program of a config, by default on all devices."""
  return build_program(spec_of(cfg), devices, cfg)


def mesh_keys(mesh: str) -> dict[str, int]:
  """Config keys of a mesh such as `data=2 fsdp=4`; other degrees are 1."""
  degrees = {"fsdp": 1} | dict(degree.split("=") for degree in mesh.split())
  return {f"ici_{mesh_axis}_parallelism": int(degree) for mesh_axis, degree in degrees.items()}


def uneven_batch(seed: int) -> Batch:
  """Rows of several documents and unequal length; every fourth row and one more are padding.

  So the rows of one shard of eight, and one of four micro-batches, hold not a single token.
  """
  draw = np.random.default_rng(seed)
  rows = []
  for row in range(ROWS):
    if row % 4 == 3 or row == 6:
      num_tokens = 0
      lengths = np.zeros(0, int)
    else:
      num_tokens = draw.integers(4, LENGTH + 1)
      cuts = np.unique(draw.integers(1, max(num_tokens, 2), 2))
      lengths = np.diff([0, *cuts, num_tokens])
    ids = draw.integers(VOCAB, size=num_tokens + 1)
    targets = ids[1:].copy()
    targets[np.cumsum(lengths) - 1] = -1
    rows.append(pad_row(ids[:num_tokens], targets[:num_tokens], lengths, LENGTH))
  return Batch(**trees.stack(rows))


@contextlib.contextmanager
def fast_compilation() -> Iterator[None]:
  """Disable most compiler optimizations."""
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
  """A list that gets the name of every program that is compiled, such as `jit(train_step)`."""
  with _functions_of("backend_compile") as found:
    yield found


@contextlib.contextmanager
def traces() -> Iterator[list[str]]:
  """A list that gets the name of every jitted function that is traced, such as `train_step`."""
  with _functions_of("jaxpr_trace") as found:
    yield found


@contextlib.contextmanager
def _functions_of(kind: str) -> Iterator[list[str]]:
  """A list that gets the function's name from every event of JAX of this kind."""
  found: list[str] = []

  def listen(event: str, _seconds: float, *, fun_name: str = "", **_others: object) -> None:
    if kind in event:
      found.append(fun_name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield found
  jax.monitoring.unregister_event_duration_listener(listen)


def place(program: Program, batch: Batch) -> Batch:
  return to_global(batch, program.batch_sharding, program.batch_shape)


def state_on(program: Program, host_state: object) -> object:
  """A copy of `host_state` (numpy) on the mesh, which the program's step may donate."""
  return jax.tree.map(
    lambda leaf, like: jax.device_put(leaf, like.sharding), host_state, program.abstract_state
  )


def take_steps(program: Program, host_state: object, batches: list[Batch]) -> tuple[object, list]:
  """(state on the host, metrics of each step) after a step on each batch."""
  state = state_on(program, host_state)
  rows = []
  for batch in batches:
    state, metrics = program.step(state, place(program, batch))
    rows.append(jax.device_get(metrics))
  return jax.device_get(state), rows


def assert_same_steps(got: tuple[object, list], want: tuple[object, list]) -> None:
  """Assert that results of `take_steps` are equal up to float32 rounding."""
  state, rows = got
  expected_state, expected_rows = want
  for row, expected_row in zip(rows, expected_rows, strict=True):
    assert row.keys() == expected_row.keys()
    for name, value in expected_row.items():
      np.testing.assert_allclose(row[name], value, rtol=1e-5, err_msg=name)
  for leaf, expected in trees.leaf_pairs(state, expected_state):
    np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-6)
