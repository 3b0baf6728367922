"""tokamax's kernels: what the adapters refuse, and compilation for absent GPUs.

Results on CPUs, by tokamax's XLA operations: test_attention.py.
"""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpus import (
  compile_gradients,
  count_kernels,
  needs_compiler,
  trace_for_absent_gpu,
)

from maxlite.errors import UserError
from maxlite.kernels import tokamax_library
from maxlite.kernels.attention import tokamax as attention_kernels
from maxlite.kernels.attention.reference import AttentionMask, ScoreOptions

needs_tokamax = pytest.mark.skipif(
  not tokamax_library.is_installed(), reason="tokamax, which needs Python 3.12, is not installed"
)


def attend(mask, q_BTHC, k_BSGC, v_BSGC, soft_cap=0.0):
  score = ScoreOptions(scale=0.1, block_q=1, soft_cap=soft_cap)
  return attention_kernels.attention(q_BTHC, k_BSGC, v_BSGC, mask, score)


def attend_ones(dtype):
  segment_BT = np.ones((1, 8), np.int32)
  mask = AttentionMask(segment_BT, segment_BT, 0, None)
  ones_BTHC = jnp.ones((1, 8, 2, 16), dtype)
  return attend(mask, ones_BTHC, ones_BTHC, ones_BTHC)


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(("q_start", "num_queries"), [(0, 40), (10, 20), (20, 20)])
def test_the_ranges_of_keys_are_the_visible_keys(q_start, num_queries, window):
  segments = [np.repeat([1, 2, 3, 0], [7, 20, 6, 7]), np.repeat([5, 4], [1, 39])]
  segment_BS = np.stack(segments).astype(np.int32)
  q_segment_BT = segment_BS[:, q_start : q_start + num_queries]
  mask = AttentionMask(q_segment_BT, segment_BS, jnp.int32(q_start), window)
  start_BT, stop_BT = attention_kernels._key_ranges(mask, is_aligned=False)
  key_S = np.arange(40)
  start_BT1 = np.asarray(start_BT)[..., None]
  stop_BT1 = np.asarray(stop_BT)[..., None]
  in_range_BTS = (key_S >= start_BT1) & (key_S < stop_BT1)
  np.testing.assert_array_equal(in_range_BTS, mask.visible_BTS)
  if num_queries == 40:
    aligned = attention_kernels._key_ranges(mask._replace(q_start=0), is_aligned=True)
    np.testing.assert_array_equal(aligned.start_BT, start_BT)
    assert aligned.stop_BT is None  # the kernels' own causal mask


@pytest.mark.parametrize(("window", "num_visible"), [(None, 36), (3, 21)])
def test_the_stated_cost_counts_the_visible_scores(window, num_visible):
  q_BTHC = jnp.ones((2, 4, 6, 16))
  k_BSGC = jnp.ones((2, 8, 3, 16))
  v_BSGC = jnp.ones((2, 8, 3, 5))
  options = attention_kernels._AttendOptions("xla", 1.0, 0.0, is_aligned=False, window=window)
  cost = attention_kernels._cost(options, 21, q_BTHC, k_BSGC, v_BSGC)
  assert cost.flops == 2 * 2 * 6 * (num_visible / 2) * 21  # a half of the queries
  assert cost.fixed_bytes == 4 * (q_BTHC.size + k_BSGC.size + v_BSGC.size + 2 * 4 * 6 * 5)


def test_float32_is_an_error():
  with pytest.raises(UserError, match="attention=tokamax does not support float32; write dtype"):
    attend_ones(jnp.float32)


@needs_tokamax
def test_a_cpu_is_an_error():
  with pytest.raises(UserError, match=r"attention=tokamax: Not supported on cpu\. Write"):
    attend_ones(jnp.bfloat16)


def test_a_missing_package_is_an_error(monkeypatch):
  monkeypatch.setattr(tokamax_library, "is_installed", lambda: False)
  monkeypatch.setattr(tokamax_library, "find_attention", lambda: None)
  with pytest.raises(UserError, match="attention=tokamax: the package tokamax is not installed; "):
    attend_ones(jnp.bfloat16)


@needs_tokamax
def test_a_version_without_the_private_names_is_an_error(monkeypatch):
  assert tokamax_library.find_attention() is not None
  monkeypatch.delattr("tokamax._src.ops.attention.base.Mask")
  assert tokamax_library.find_attention.__wrapped__() is None
  monkeypatch.setattr(tokamax_library, "find_attention", lambda: None)
  with pytest.raises(UserError, match=r"tokamax 0.* has not the masks .*; install tokamax"):
    attend_ones(jnp.bfloat16)


def test_warnings_of_untuned_shapes_are_dropped(caplog):
  tokamax_library._drop_warnings_of_tuning()
  logger = logging.getLogger("absl")
  logger.warning("Autotuning cache miss for %s", "a kernel")
  logger.warning("another warning")
  assert "another warning" in caplog.text
  assert "cache miss" not in caplog.text


# Positions, query heads, key/value heads, channels of keys and of values, window, soft cap.
ATTENTION_SHAPES = {
  "llama3.1-8b": (8192, 32, 8, 128, 128, None, 0.0),
  "deepseek2-16b": (2048, 16, 16, 192, 128, None, 0.0),
  "gemma2-9b": (8192, 16, 8, 256, 256, 4096, 50.0),
}


@needs_tokamax
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("part", [1, 4])
@pytest.mark.parametrize("name", ATTENTION_SHAPES)
def test_attention_compiles_without_a_block_of_scores_in_memory(name, part):
  """Of all queries, and of a part of them, as on a shard of the context axis."""
  num_keys, num_heads, num_groups, num_channels, num_values, window, cap = ATTENTION_SHAPES[name]
  num_queries = num_keys // part
  segment_BS = np.ones((1, num_keys), np.int32)
  q_start = 0 if part == 1 else num_queries
  mask = AttentionMask(segment_BS[:, :num_queries], segment_BS, q_start, window)
  policy = jax.checkpoint_policies.save_only_these_names("attention_out")
  function = functools.partial(attend, mask, soft_cap=cap)
  shapes = [
    (1, num_queries, num_heads, num_channels),
    (1, num_keys, num_groups, num_channels),
    (1, num_keys, num_groups, num_values),
  ]
  with trace_for_absent_gpu():
    compiled = compile_gradients(jax.checkpoint(function, policy=policy), shapes)
  assert count_kernels(compiled) == 3  # forward, gradient of queries, gradients of keys and values
  query_bytes = 2 * np.prod(shapes[0])
  key_bytes = 2 * num_keys * num_heads * (num_channels + num_values)
  assert compiled.memory_analysis().temp_size_in_bytes <= 4 * (query_bytes + key_bytes)
