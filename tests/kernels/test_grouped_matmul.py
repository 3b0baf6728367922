"""Every backend of grouped_matmul against one product per group, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import (
  CASES,
  INTERPRETED,
  NARROW_ONLY,
  NARROW_UNITS,
  assert_close,
  assert_right,
  assert_right_for_every_routing,
  make_case,
  multiplier,
  oracle,
  run,
  value_and_gradients,
)
from jax.sharding import PartitionSpec as P
from slow_cases import slow

from maxlite.config.registry import GROUPED_MATMUL_BACKENDS
from maxlite.kernels.grouped_matmul import api
from maxlite.kernels.hardware import Hardware

# By default only `tiled`, which could depend on its tiles, runs every case.
FLOAT64 = [name for name in GROUPED_MATMUL_BACKENDS if name not in NARROW_ONLY]


@pytest.mark.parametrize(
  ("backend", "case"),
  [
    (name, case) if name == "tiled" or case in ("skewed", "tail") else slow(name, case)
    for name in FLOAT64
    for case in CASES
  ],
)
def test_agrees_with_one_product_per_group_in_float64(backend, case):
  with jax.enable_x64(True):
    arrays = make_case(case)
    assert_close(run(multiplier(backend), *arrays), oracle(*arrays), unit=1e-12)


@pytest.mark.parametrize(
  ("backend", "dtype"),
  [
    slow(name, dtype) if dtype == "bfloat16" and name in INTERPRETED else (name, dtype)
    for name in GROUPED_MATMUL_BACKENDS
    for dtype in NARROW_UNITS
  ],
)
def test_narrow_types_are_exact_up_to_their_rounding(backend, dtype):
  assert_right_for_every_routing(multiplier(backend), 6, 10, dtype)


@pytest.mark.parametrize("backend", GROUPED_MATMUL_BACKENDS)
@pytest.mark.parametrize("case", ["no_rows", slow("one_row"), "few_rows"])
def test_few_rows(backend, case):
  assert_right(multiplier(backend), *make_case(case, "float32"))


@pytest.mark.parametrize("backend", GROUPED_MATMUL_BACKENDS)
def test_the_weight_gradient_has_the_type_and_precision_of_the_weights(backend):
  x_MD, w_GDF, sizes_G, dy_MF = make_case("tail", jnp.bfloat16)
  arrays = x_MD, w_GDF.astype(np.float32), sizes_G, dy_MF
  y_MF, dx_MD, dw_GDF = run(multiplier(backend), *arrays)
  assert (y_MF.dtype, dx_MD.dtype, dw_GDF.dtype) == (jnp.bfloat16, jnp.bfloat16, np.float32)
  # XLA's gradient rule rounds to x's type.
  unit = NARROW_UNITS["bfloat16" if backend == "ragged_dot" else "float32"]
  assert_close([dw_GDF], oracle(*arrays)[2:], unit)


@pytest.mark.parametrize("backend", GROUPED_MATMUL_BACKENDS)
def test_vmap_equals_separate_calls(backend):
  first = make_case("tail", np.float32)
  second = [a[::-1].copy() for a in (first[0][:99], first[1], first[2], first[3][:99])]
  second[0], second[3] = (np.pad(a, ((0, 101), (0, 0))) for a in (second[0], second[3]))
  stacked = [np.stack(pair) for pair in zip(first, second, strict=True)]
  multiply = multiplier(backend)

  def all_three(x_MD, w_GDF, sizes_G, dy_MF):
    remade = jax.checkpoint(lambda x, w: multiply(x, w, sizes_G))
    return value_and_gradients(remade, x_MD, w_GDF, dy_MF)

  together = jax.jit(jax.vmap(all_three))(*stacked)
  for member, arrays in enumerate((first, second)):
    assert_close([np.asarray(a[member]) for a in together], oracle(*arrays), unit=1e-5)


@pytest.mark.parametrize("backend", GROUPED_MATMUL_BACKENDS)
def test_shards_multiply_their_rows_inside_shard_map(backend):
  mesh = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  num_shards = 8
  num_rows = 40
  draw = np.random.default_rng(1).normal
  x_PMD = draw(size=(num_shards, num_rows, 6))
  dy_PMF = draw(size=(num_shards, num_rows, 4))
  w_PGDF = draw(size=(num_shards, 2, 6, 4))
  sizes_PG = np.random.default_rng(2).integers(0, 18, size=(num_shards, 2), dtype=np.int32)
  arrays = [a.astype(np.float32) for a in (x_PMD, w_PGDF)] + [sizes_PG, dy_PMF.astype(np.float32)]

  def multiply(x_pMD, w_pGDF, sizes_pG):
    return multiplier(backend)(x_pMD[0], w_pGDF[0], sizes_pG[0])[None]

  # check_vma=False: interpreted kernels do not carry varying axes.
  split = P("expert")
  checked = backend not in INTERPRETED
  sharded = jax.shard_map(multiply, mesh=mesh, in_specs=split, out_specs=split, check_vma=checked)
  together = jax.jit(
    lambda x, w, sizes, dy: value_and_gradients(lambda x, w: sharded(x, w, sizes), x, w, dy)
  )(*arrays)
  for shard in range(num_shards):
    alone = oracle(*(a[shard] for a in arrays))
    assert_close([np.asarray(a[shard]) for a in together], alone, unit=1e-5)


@pytest.mark.parametrize(
  ("hardware", "dtype", "is_installed", "backend"),
  [
    (Hardware("cpu"), "bfloat16", True, "tiled"),
    (Hardware("tpu"), "bfloat16", True, "megablox"),
    (Hardware("gpu", 9.0), "bfloat16", True, "tokamax"),
    (Hardware("gpu", 9.0), "bfloat16", False, "ragged_dot"),
    (Hardware("gpu", 9.0), "float32", True, "ragged_dot"),
    (Hardware("gpu", 8.0), "bfloat16", True, "ragged_dot"),
    (Hardware("gpu", 10.0), "bfloat16", True, "ragged_dot"),
  ],
)
def test_auto_chooses_by_hardware_and_type(monkeypatch, hardware, dtype, is_installed, backend):
  monkeypatch.setattr(api, "is_installed", lambda: is_installed)
  assert api.resolve_backend("auto", hardware, dtype) == backend


def test_a_named_backend_is_used_and_an_unknown_name_is_an_error():
  for name in GROUPED_MATMUL_BACKENDS:
    assert api.resolve_backend(name, Hardware("cpu"), "float32") == name
  with pytest.raises(
    ValueError, match="'tyled' is not a backend; choose auto or one of: reference"
  ):
    api.resolve_backend("tyled", Hardware("cpu"), "float32")
