"""Megablox: tiles, varying axes and compilation for TPUs."""

import functools
import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from grouped_cases import (
  Case,
  assert_close,
  assert_right_for_every_routing,
  fill_case,
  multiplier,
  oracle,
  value_and_gradients,
)
from jax.sharding import PartitionSpec as P
from megablox_compiles import CHIPS, SHAPES

from maxlite.kernels.grouped_matmul import megablox
from maxlite.kernels.grouped_matmul.tiles import TPU_SPECS, Tiles, choose_tiles

needs_libtpu = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="compilation for TPUs requires libtpu"
)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_that_divide_no_axis_give_the_same_result(dtype):
  tiles = Tiles(fwd=(64, 128, 128), dlhs=(32, 256, 128), drhs=(64, 128, 256))
  assert_right_for_every_routing(multiplier("megablox", tiles), 200, 136, dtype)


def test_each_pass_uses_its_tile_in_the_order_of_the_weights_axes():
  tiles = Tiles(fwd=(16, 128, 512), dlhs=(32, 512, 128), drhs=(64, 256, 256))
  x_MD, w_GDF, sizes_G, dy_MF = fill_case(Case(64, 512, 1024, (64,)), np.float32)

  def all_three(x_MD, w_GDF, dy_MF):
    multiply = functools.partial(megablox.grouped_matmul, group_sizes_G=sizes_G, tiles=tiles)
    return value_and_gradients(multiply, x_MD, w_GDF, dy_MF)

  text = str(jax.make_jaxpr(all_three)(x_MD, w_GDF, dy_MF))
  # Grids: (tiles of N, visits, tiles of K); for the sum (tiles of N, tiles of K, visits).
  grids = re.findall(r"grid=\(([\w, ]*)\).*?block_size=(\d+)", text)
  assert sorted(grids) == [
    ("1, DynamicGridDim, 8", "32"),
    ("2, DynamicGridDim, 4", "16"),
    ("4, 2, DynamicGridDim", "64"),
  ]


@pytest.mark.parametrize("tile", [(100, 128, 128), (128, 100, 128), (128, 128, 130)])
def test_an_unsupported_tile_is_an_error(tile):
  x_MD, w_GDF, sizes_G, _ = fill_case(Case(128, 256, 256, (128,)), np.float32)
  with pytest.raises(ValueError, match=r"Megablox tile \[1.*rows must be a multiple of 16"):
    megablox.grouped_matmul(x_MD, w_GDF, sizes_G, Tiles(drhs=tile))


def sharded_multiply(check_vma):
  mesh = jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))

  def multiply(x_mD, w_GDF, sizes_pG):
    return multiplier("megablox")(x_mD, w_GDF, sizes_pG[0])

  rows = P("expert")
  return jax.shard_map(
    multiply, mesh=mesh, in_specs=(rows, P(), rows), out_specs=rows, check_vma=check_vma
  )


def test_the_gradient_of_a_shared_weight_is_the_sum_over_shards():
  cases = []
  for sizes in ((3, 9), (0, 0), (20, 0), (1, 19)):
    cases.append(fill_case(Case(20, 6, 10, sizes), np.float32))
  w_GDF = cases[0].w_GDF
  x_MD = np.concatenate([case.x_MD for case in cases])
  dy_MF = np.concatenate([case.dy_MF for case in cases])
  sizes_PG = np.stack([case.sizes_G for case in cases])
  multiply = sharded_multiply(check_vma=False)  # see supports_vma

  @jax.jit
  def all_three(x_MD, w_GDF, sizes_PG, dy_MF):
    def multiply_groups(x_MD, w_GDF):
      return multiply(x_MD, w_GDF, sizes_PG)

    return value_and_gradients(multiply_groups, x_MD, w_GDF, dy_MF)

  expected_y = []
  expected_dx = []
  expected_dw = []
  for case in cases:
    y_MF, dx_MD, dw_GDF = oracle(case._replace(w_GDF=w_GDF))
    expected_y.append(y_MF)
    expected_dx.append(dx_MD)
    expected_dw.append(dw_GDF)
  expected = (np.concatenate(expected_y), np.concatenate(expected_dx), sum(expected_dw))
  results = [np.asarray(a) for a in all_three(x_MD, w_GDF, sizes_PG, dy_MF)]
  assert_close(results, expected, unit=1e-5)


def test_jax_s_kernels_do_not_support_check_vma():
  """If this fails, set supports_vma in the entry of Megablox."""
  x_MD, w_GDF, sizes_G, _ = fill_case(Case(80, 6, 10, (3, 9)), np.float32)
  with pytest.raises(ValueError, match="check_vma=False"):
    sharded_multiply(check_vma=True)(x_MD, w_GDF, np.stack([sizes_G] * 4))


def assert_fits(width, dim):
  """Assert that tiles of this width fit an axis, and waste little of a long one."""
  assert width == dim or (width % 128 == 0 and width < dim)
  num_tiles = math.ceil(dim / width)
  assert num_tiles * width <= 1.15 * dim or dim < 1024


def test_default_tiles_are_whole_axes_or_multiples_of_lanes_with_little_waste():
  shapes = []
  for shape in SHAPES.values():
    shapes += [shape, shape.transposed]
  for kind in TPU_SPECS:
    for num_rows, num_groups, num_in, num_out in shapes:
      tiles = choose_tiles(num_rows, num_groups, num_in, num_out, 2, 4, kind)
      for m, d, f in tiles:
        assert m % 16 == 0
        assert_fits(d, num_in)
        assert_fits(f, num_out)


def compile_in_subprocess(chips, shapes):
  """Reports of programs compiled in a separate process, which libtpu's settings require."""
  script = Path(__file__).with_name("megablox_compiles.py")
  command = [sys.executable, str(script), ",".join(chips), ";".join(shapes)]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  return [json.loads(line) for line in done.stdout.splitlines()]


def assert_only_kernels(reports):
  for report in reports:
    assert "error" not in report, report
    assert report["kernels"] == 3, report
    assert report["dense_products"] == 0, report


@needs_libtpu
def test_compiles_to_three_kernels_and_no_dense_product():
  assert_only_kernels(compile_in_subprocess(["v5p"], ["odd"]))


@pytest.mark.slow
@needs_libtpu
def test_default_tiles_fit_every_chip_at_published_sizes():
  reports = compile_in_subprocess(CHIPS, SHAPES)
  assert len(reports) == len(CHIPS) * len(SHAPES) * 2
  assert_only_kernels(reports)
