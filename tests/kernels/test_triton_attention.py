"""The Triton attention kernels: blocks, and lowering and compilation for absent GPUs.

Results in narrow types and under shard_map: test_attention.py.
"""

import functools
import importlib.util
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.kernels.attention import reference, triton
from maxlite.kernels.attention.reference import AttentionMask
from maxlite.kernels.stated_cost import parse_stated_cost
from maxlite.sharding.collectives import pvary

# JAX 0.12 warns whenever it lowers such a kernel.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


def draw(shape, dtype=np.float64, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def value_and_gradients(attention, do_BTHC, q_BTHC, k_BSGC, v_BSGC, sink_H):
  o_BTHC, vjp = jax.vjp(attention, q_BTHC, k_BSGC, v_BSGC, sink_H)
  return o_BTHC, *vjp(do_BTHC)


def attend(module, mask, has_sinks, soft_cap, operands, **interpret):
  def attention(q_BTHC, k_BSGC, v_BSGC, sink_H):
    options = {"scale": 0.2, "block_q": 1, "soft_cap": soft_cap, "sink_H": sink_H}
    options["sink_H"] = sink_H if has_sinks else None
    return module.attention(q_BTHC, k_BSGC, v_BSGC, mask, **options, **interpret)

  return jax.jit(functools.partial(value_and_gradients, attention))(*operands)


@pytest.mark.parametrize(
  ("q_start", "num_queries", "window", "soft_cap", "has_sinks"),
  [(0, 75, None, 0.0, False), (33, 42, 20, 1.5, True)],
)
def test_many_blocks_in_float64(q_start, num_queries, window, soft_cap, has_sinks):
  """Blocks of 32 rows; 48 and 40 channels: two parts, and one with padding; documents."""
  num_keys, num_heads, num_groups = 75, 4, 2
  segment_BS = np.stack([np.repeat([1, 2, 0], [41, 25, 9]), np.ones(num_keys)]).astype(np.int32)
  shapes = ((2, num_queries, num_heads, 40), (2, num_queries, num_heads, 48))
  shapes += (2, num_keys, num_groups, 48), (2, num_keys, num_groups, 40), (num_heads,)
  with jax.enable_x64(True):
    mask = AttentionMask(segment_BS[:, q_start:][:, :num_queries], segment_BS, q_start, window)
    operands = [draw(shape, seed=i) for i, shape in enumerate(shapes)]
    arguments = mask, has_sinks, soft_cap, operands
    for got, want in zip(
      attend(triton, *arguments, interpret=True), attend(reference, *arguments), strict=True
    ):
      np.testing.assert_allclose(got, want, rtol=0, atol=1e-12)


def test_blocks_in_the_future_before_the_window_or_of_other_documents_are_not_visited():
  segment_BT = np.repeat(np.array([[1, 2, 0]], np.int32), [512, 384, 128], axis=1)
  options = triton._KernelOptions(1.0, 0.0, 129, False, False)
  rows = triton._Rows(np.zeros(1, np.int32), segment_BT, segment_BT)
  overlap_IJ = np.asarray(triton._overlap(options, rows, triton._Blocks(128, 128)))[0]
  same_document = np.kron(np.diag([1, 1, 0]), np.ones((4, 4)))[:7, :7]
  expected_IJ = np.zeros((8, 8))
  expected_IJ[:7, :7] = same_document * (np.eye(7) + np.eye(7, k=-1))
  expected_IJ[7, 7] = 1
  np.testing.assert_array_equal(overlap_IJ, expected_IJ)
  first_I, after_I = np.asarray(triton._block_ranges(overlap_IJ[None]))[0].T
  np.testing.assert_array_equal(after_I - first_I, expected_IJ.sum(1))


def structs(sharding, dtype, num_positions, num_heads, num_groups, num_channels, num_values):
  shapes = (
    (num_positions, num_heads, num_values),
    (num_positions, num_heads, num_channels),
    (num_positions, num_groups, num_channels),
    (num_positions, num_groups, num_values),
  )
  arrays = [jax.ShapeDtypeStruct((8, *s), dtype, sharding=sharding("data")) for s in shapes]
  segment_BT = jax.ShapeDtypeStruct((8, num_positions), jnp.int32, sharding=sharding("data"))
  sink_H = jax.ShapeDtypeStruct((num_heads,), jnp.float32, sharding=sharding())
  return segment_BT, *arrays, sink_H


def abstract_mesh():
  """Eight H200, which JAX 0.11 must have to lower Triton kernels where there is no GPU."""
  device = AbstractDevice("NVIDIA H200", 132, "gpu")
  return AbstractMesh((8,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=device)


def all_results(segment_BT, do_BTHC, *operands, shard=lambda function: function, **options):
  def attention(q_BTHC, k_BSGC, v_BSGC, sink_H):
    def on_shard(*arrays):
      q_BTHC, k_BSGC, v_BSGC, sink_H, segment_BT = pvary(*arrays)
      mask = AttentionMask(segment_BT, segment_BT, 0, options.get("window"))
      rest = {"scale": 0.1, "block_q": 1, "soft_cap": options.get("soft_cap", 0.0)}
      return triton.attention(q_BTHC, k_BSGC, v_BSGC, mask, **rest, sink_H=sink_H)

    return shard(on_shard)(q_BTHC, k_BSGC, v_BSGC, sink_H, segment_BT)

  return value_and_gradients(attention, do_BTHC, *operands)


@pytest.mark.parametrize(
  ("num_rows", "blocks", "window"),
  [(512, (128, 64), None), (512, (32, 128), 65), (300, (64, 64), 1), (300, (64, 64), 128)],
)
def test_the_stated_cost_counts_the_blocks_of_scores_that_are_visited(num_rows, blocks, window):
  segment_BT = np.ones((1, num_rows), np.int32)
  options = triton._KernelOptions(1.0, 0.0, window, False, False)
  rows = triton._Rows(np.zeros(1, np.int32), segment_BT, segment_BT)
  blocks = triton._Blocks(*blocks)
  visited = np.asarray(triton._overlap(options, rows, blocks)).sum() * blocks.q * blocks.k
  shape = triton._Shape(num_rows, num_rows, 1, (), (), blocks)
  assert triton._num_scores(shape, window) == visited
  assert triton._num_scores(shape._replace(T=num_rows // 4), window) == visited / 4


@pytest.mark.smoke
@pytest.mark.parametrize(
  ("dtype", "num_scores"), [(jnp.bfloat16, 18 * 128 * 64), (jnp.float32, 90 * 32 * 32)]
)
def test_lowers_to_three_triton_kernels_with_check_vma(dtype, num_scores):
  """Forward and backward pass on eight shards with shared sinks, for an H200."""
  mesh = abstract_mesh()
  split = P("data")
  shard = functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(split, split, split, P(), split),
    out_specs=split,
    check_vma=True,
  )
  run = functools.partial(all_results, shard=shard, window=100, soft_cap=50.0)
  arguments = structs(lambda *spec: NamedSharding(mesh, P(*spec)), dtype, 640, 8, 2, 192, 128)
  with jax.sharding.use_abstract_mesh(mesh):
    lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
  text = lowered.as_text(debug_info=True)
  assert text.count("__gpu$xla.gpu.triton") == 3
  assert "stablehlo.dot_general" not in text
  assert text.count('"stablehlo.all_reduce"') == 1  # for the gradient of the shared sinks
  costs = {kernel: parse_stated_cost(scopes) for scopes, kernel in KERNEL.findall(text)}
  products = {"forward": 192 + 128, "dq": 2 * 192 + 128, "dkv": 2 * 192 + 2 * 128}
  flops = {kernel: 2 * 8 * num_scores * channels for kernel, channels in products.items()}
  assert {kernel: cost.flops for kernel, cost in costs.items()} == flops
  # Queries, keys, values and results, and arrays without channels.
  moved = 640 * (8 * (192 + 128) + 2 * (192 + 128)) * jnp.dtype(dtype).itemsize
  assert moved < costs["forward"].fixed_bytes < 1.02 * moved


KERNEL = re.compile(r'"([^"]*)/(\w+)_kernel/pallas_call')
# A GpuTargetConfigProto in text form, from XLA's sources.
TARGET_CONFIG = os.environ.get("MAXLITE_GPU_TARGET_CONFIG", "")
# Positions, query heads, key/value heads, channels of keys and of values, further options.
SHAPES = {
  "llama3.1-8b": (8192, 32, 8, 128, 128, {}),
  "deepseek2-16b": (2048, 16, 16, 192, 128, {}),
  "gemma2-9b": (8192, 16, 8, 256, 256, {"window": 4096, "soft_cap": 50.0}),
  "gpt-oss-20b": (8192, 64, 8, 64, 64, {"window": 128}),
}


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the jax-cuda13-plugin"
)
@pytest.mark.skipif(not TARGET_CONFIG, reason="MAXLITE_GPU_TARGET_CONFIG names no target config")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_without_a_block_of_scores_in_memory(name, dtype):
  from jax.experimental import topologies

  *shape, options = SHAPES[name]
  target = pathlib.Path(TARGET_CONFIG).expanduser().read_text()
  topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
  one = jax.sharding.SingleDeviceSharding(topology.devices[0])
  arguments = structs(lambda *spec: one, dtype, *shape)
  with jax.sharding.use_abstract_mesh(abstract_mesh()):
    traced = jax.jit(functools.partial(all_results, **options)).trace(*arguments)
    compiled = traced.lower(lowering_platforms=("cuda",)).compile()
  assert compiled.as_text().count("__gpu$xla.gpu.triton") == 3
  query_bytes = arguments[1].size * dtype.dtype.itemsize
  assert compiled.memory_analysis().temp_size_in_bytes <= 4 * query_bytes
