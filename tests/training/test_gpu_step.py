"""The step as it is traced for GPUs, run on CPUs: unrolled, with one pass over the logits.

Kernels stay those of CPUs; tests/kernels has the GPU's.
"""

import functools

import jax
import numpy as np
import pytest
from support import trees
from support.slow_cases import slow
from support.tiny import build, config_of, mesh_keys, place, uneven_batch

from maxlite.sharding import Sharder

SCANNED = {"scan_layers": True, "base_num_decoder_layers": 3, "gradient_clipping_threshold": 1.0}
DENSE = {"decoder_block": "llama", "remat_policy": "minimal"}


def step_of(monkeypatch, program_of, platform, keys, *, poison=False):
  """(state before a step, state and metrics after it)."""
  with monkeypatch.context() as patch:
    patch.setattr(Sharder, "platform", platform)
    program = program_of(platform, **SCANNED, **keys)
    state = program.init(0)
    if poison:
      state = state.replace(params=jax.tree.map(lambda leaf: leaf * np.nan, state.params))
    before = jax.tree.map(np.array, state)
    state, metrics = program.step(state, place(program, uneven_batch(0)))
  return before, state, metrics


@pytest.fixture(scope="module")
def program_of():
  """A function from platform and config keys to the program; tests share equal ones."""
  return functools.cache(lambda _platform, **keys: build(config_of(**keys)))


@pytest.mark.parametrize(
  ("keys", "mesh"),
  [
    (DENSE, "data=8"),
    slow({"decoder_block": "mixtral", "remat_policy": "minimal"}, "data=8"),
    slow({"decoder_block": "llama", "remat_policy": "full"}, "fsdp=4 tensor=2"),
    slow({"decoder_block": "llama", "remat_policy": "none"}, "data=8"),
    slow({"decoder_block": "qwen3_moe", "remat_policy": "minimal"}, "fsdp=2 expert=4"),
    slow({"decoder_block": "gemma2", "remat_policy": "minimal"}, "context=2 fsdp=4"),
    slow({"decoder_block": "deepseek", "z_loss_multiplier": 1e-3}, "fsdp=8"),
    slow({"decoder_block": "deepseek", "mtp_num_layers": 1}, "fsdp=8"),
    slow({"decoder_block": "llama", "gradient_accumulation_steps": 2}, "data=8"),
  ],
)
def test_a_gpus_step_equals_a_cpus(keys, mesh, monkeypatch, program_of):
  keys = keys | mesh_keys(mesh)
  _, expected_state, expected = step_of(monkeypatch, program_of, "cpu", keys)
  _, state, metrics = step_of(monkeypatch, program_of, "gpu", keys)
  np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
  np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-5)
  for leaf, expected_leaf in trees.leaf_pairs(state.params, expected_state.params):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-5, atol=1e-6)
  for leaf, expected_leaf in trees.leaf_pairs(state.opt_state, expected_state.opt_state):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-7)


def test_a_gpu_skips_a_step_that_is_not_finite(monkeypatch, program_of):
  keys = DENSE | mesh_keys("data=8")
  before, state, metrics = step_of(monkeypatch, program_of, "gpu", keys, poison=True)
  assert not np.isfinite(metrics["loss"])
  assert int(metrics["skipped"]) == 1
  for name in ("params", "opt_state"):
    for old, new in trees.leaf_pairs(getattr(before, name), getattr(state, name)):
      np.testing.assert_array_equal(old, new)
