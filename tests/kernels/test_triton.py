"""The Triton kernels: interpreted, and lowered and compiled for absent GPUs."""

import functools
import importlib.util
import os
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import assert_close, fill_case, make_case, oracle, run, value_and_gradients
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.kernels.grouped_matmul import triton
from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tiles
from maxlite.kernels.stated_cost import parse_stated_cost
from maxlite.sharding.collectives import pvary

# JAX 0.12 warns whenever it lowers such a kernel.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")

# The three sides differ so that swapping two of them is detected.
TILES = Tiles(fwd=(16, 32, 64), dlhs=(32, 64, 16), drhs=(64, 16, 32))

interpreted = functools.partial(triton.grouped_matmul, tiles=TILES, interpret=True)


def test_many_ragged_tiles_of_every_axis_in_float64():
  with jax.enable_x64(True):
    arrays = fill_case(610, 70, 75, (3, 0, 401, 160))
    assert_close(run(interpreted, *arrays), oracle(*arrays), unit=1e-12)


def test_tiles_of_rows_may_be_stored_in_any_order(monkeypatch):
  """The interpreter runs programs sequentially, so a later one would hide stores out of bounds."""
  in_order = triton._row_tiles
  monkeypatch.setattr(triton, "_row_tiles", lambda *arguments: in_order(*arguments)[::-1])
  arrays = fill_case(90, 20, 24, (33, 0, 50), np.float32)
  assert_close(run(interpreted, *arrays), oracle(*arrays), unit=1e-5)


def test_the_gradient_of_a_shared_weight_is_the_sum_over_shards():
  mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  sizes_PG = np.array([[5, 0, 11], [0, 24, 0], [0, 0, 0], [1, 2, 3]], np.int32)
  shards = [fill_case(24, 6, 5, sizes, np.float32) for sizes in sizes_PG]
  x_PMD, dy_PMF = (np.stack([shard[i] for shard in shards]) for i in (0, 3))
  w_GDF = shards[0][1]
  sharded = jax.shard_map(
    lambda x_pMD, w_GDF, sizes_pG: interpreted(x_pMD[0], w_GDF, sizes_pG[0])[None],
    mesh=mesh,
    in_specs=(P("expert"), P(), P("expert")),
    out_specs=P("expert"),
    # The interpreter's slices do not carry varying axes; the lowering test checks them.
    check_vma=False,
  )
  y_PMF, dx_PMD, dw_GDF = jax.jit(
    lambda x, w, dy: value_and_gradients(lambda x, w: sharded(x, w, sizes_PG), x, w, dy)
  )(x_PMD, w_GDF, dy_PMF)
  y_xMF, dx_xMD, dw_xGDF = zip(*(oracle(x, w_GDF, s, dy) for x, _, s, dy in shards), strict=True)
  expected = np.stack(y_xMF), np.stack(dx_xMD), sum(dw_xGDF)
  assert_close([np.asarray(a) for a in (y_PMF, dx_PMD, dw_GDF)], expected, unit=1e-5)


def lowered_text(num_rows, num_groups, row_dtype, tiles=DEFAULT_TILES):
  """Forward and backward pass of eight shards with a shared weight, check_vma=True, for an H200."""
  device = AbstractDevice("NVIDIA H200", 132, "gpu")
  mesh = AbstractMesh((8,), ("expert",), (jax.sharding.AxisType.Auto,), abstract_device=device)

  def argument(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

  multiply = jax.shard_map(
    lambda *arrays: triton.grouped_matmul(*pvary(*arrays), tiles),
    mesh=mesh,
    in_specs=(P("expert"), P(), P("expert")),
    out_specs=P("expert"),
    check_vma=True,
  )
  arguments = (
    argument((8 * num_rows, 256), row_dtype, "expert"),
    argument((num_groups, 256, 384), jnp.float32),
    argument((8 * num_groups,), jnp.int32, "expert"),
    argument((8 * num_rows, 384), row_dtype, "expert"),
  )
  with jax.sharding.use_abstract_mesh(mesh):
    traced = jax.jit(
      lambda x, w, sizes, dy: value_and_gradients(lambda x, w: multiply(x, w, sizes), x, w, dy)
    ).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text(debug_info=True)


@pytest.mark.smoke
@pytest.mark.parametrize("row_dtype", [jnp.bfloat16, jnp.float32])
def test_lowers_to_three_triton_kernels_with_check_vma(row_dtype):
  text = lowered_text(4096, 16, row_dtype)
  assert text.count("__gpu$xla.gpu.triton") == 3
  assert "stablehlo.dot_general" not in text
  assert text.count('"stablehlo.all_reduce"') == 1  # for the gradient of the shared weight
  costs = list(map(parse_stated_cost, re.findall('"([^"]*)/pallas_call"', text)))
  assert [cost.flops for cost in costs] == [2 * 4096 * 256 * 384] * 3
  size = jnp.dtype(row_dtype).itemsize
  row, weight = 4096 * size, 16 * 256 * 384
  assert sorted((cost.row_bytes, cost.fixed_bytes) for cost in costs) == [
    (row * 256, row * 384 + weight * size),  # reads x, writes y
    (row * 384, row * 256 + weight * size),  # reads dy, writes dx
    (row * (256 + 384), weight * 4),  # reads both, writes dw
  ]


def num_programs(num_groups, tiles):
  """Grid sizes of y, dx and dw for 4096 rows and weights of 256 x 384."""
  text = lowered_text(4096, num_groups, jnp.bfloat16, tiles)
  return [int(x) for x in re.findall(r"grid_x = (\d+)", text)]


def test_programs_grow_with_rows_plus_groups_not_rows_times_groups():
  one, many = (num_programs(num_groups, DEFAULT_TILES) for num_groups in (1, 129))
  # Another group adds a tile of rows with at most 3 columns, and a matrix of 2 x 3 tiles.
  assert all(b - a <= 128 * 2 * 3 for a, b in zip(one, many, strict=True))


def test_requested_tiles_are_used():
  tiles = Tiles(fwd=(32, 64, 128), dlhs=(64, 128, 32), drhs=(16, 512, 128))
  rows_of_32, rows_of_64 = (4096 + 2 * 31) // 32, (4096 + 2 * 63) // 64
  assert num_programs(1, tiles) == [rows_of_32 * 3, rows_of_64 * 2, 1 * 3]


@pytest.mark.parametrize("side", [8, 48])
def test_an_unsupported_tile_is_an_error(side):
  x_MD, w_GDF, sizes_G, _ = make_case("uniform", np.float32)
  with pytest.raises(ValueError, match="each side must be a power of two"):
    triton.grouped_matmul(x_MD, w_GDF, sizes_G, Tiles(dlhs=(16, side, 16)))


# A GpuTargetConfigProto in text form, from XLA's sources.
TARGET_CONFIG = os.environ.get("MAXLITE_GPU_TARGET_CONFIG", "")


@pytest.mark.slow
@pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the jax-cuda13-plugin"
)
@pytest.mark.skipif(not TARGET_CONFIG, reason="MAXLITE_GPU_TARGET_CONFIG names no target config")
@pytest.mark.parametrize("num_rows", [49_152, 196_608])
@pytest.mark.parametrize(
  ("num_in", "num_out", "num_groups"), [(2048, 1408, 16), (2048, 1408, 64), (4096, 14_336, 8)]
)
def test_compiles_with_the_converted_weight_as_only_temporary(
  num_rows, num_in, num_out, num_groups
):
  from jax.experimental import topologies

  target = pathlib.Path(TARGET_CONFIG).expanduser().read_text()
  topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
  argument = functools.partial(
    jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(topology.devices[0])
  )
  arguments = (
    argument((num_rows, num_in), jnp.bfloat16),
    argument((num_groups, num_in, num_out), jnp.float32),
    argument((num_groups,), jnp.int32),
    argument((num_rows, num_out), jnp.bfloat16),
  )

  def all_three(x_MD, w_GDF, sizes_G, dy_MF):
    multiply = functools.partial(triton.grouped_matmul, group_sizes_G=sizes_G, tiles=DEFAULT_TILES)
    return value_and_gradients(multiply, x_MD, w_GDF, dy_MF)

  compiled = jax.jit(all_three).lower(*arguments).compile()
  converted_bytes = 2 * num_groups * num_in * num_out
  assert compiled.memory_analysis().temp_size_in_bytes <= 1.15 * converted_bytes
