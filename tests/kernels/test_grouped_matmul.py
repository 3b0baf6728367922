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
  Arrays,
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
from support import trees
from support.slow_cases import slow

from maxlite.kernels.grouped_matmul import api
from maxlite.kernels.hardware import Hardware
from maxlite.registry import GROUPED_MATMUL_BACKENDS

# By default every backend runs `tail`, and `tiled`, which could depend on its tiles, three more.
FLOAT64_CASES = []
for name in GROUPED_MATMUL_BACKENDS:
  for case in CASES:
    if name in NARROW_ONLY:
      continue
    if case == "tail" or (name == "tiled" and case in ("empty_ends", "few_rows", "one_hot")):
      FLOAT64_CASES.append((name, case))
    else:
      FLOAT64_CASES.append(slow(name, case))

NARROW_CASES = []
for name in GROUPED_MATMUL_BACKENDS:
  for dtype in NARROW_UNITS:
    if (name, dtype) == ("tiled", "float32") or (dtype == "bfloat16" and name in INTERPRETED):
      NARROW_CASES.append(slow(name, dtype))
    else:
      NARROW_CASES.append((name, dtype))


def without(name):
  """All backends, of which this one is slow to compile in the test."""
  return [slow(backend) if backend == name else backend for backend in GROUPED_MATMUL_BACKENDS]


@pytest.mark.parametrize(("backend", "case"), FLOAT64_CASES)
def test_agrees_with_one_product_per_group_in_float64(backend, case):
  with jax.enable_x64(True):
    arrays = make_case(case)
    results = run(multiplier(backend), arrays)
    assert_close(results, oracle(arrays), unit=1e-12)


@pytest.mark.parametrize(("backend", "dtype"), NARROW_CASES)
def test_narrow_types_are_exact_up_to_their_rounding(backend, dtype):
  assert_right_for_every_routing(multiplier(backend), 6, 10, dtype)


@pytest.mark.parametrize("backend", without("tiled"))
@pytest.mark.parametrize("case", ["no_rows", slow("one_row"), "few_rows"])
def test_few_rows(backend, case):
  assert_right(multiplier(backend), make_case(case, "float32"))


@pytest.mark.parametrize("backend", without("megablox"))
def test_the_weight_gradient_has_the_type_and_precision_of_the_weights(backend):
  arrays = make_case("tail", jnp.bfloat16)
  arrays = arrays._replace(w_GDF=arrays.w_GDF.astype(np.float32))
  y_MF, dx_MD, dw_GDF = run(multiplier(backend), arrays)
  assert y_MF.dtype == jnp.bfloat16
  assert dx_MD.dtype == jnp.bfloat16
  assert dw_GDF.dtype == np.float32
  unit = NARROW_UNITS["float32"]
  if backend in ("ragged_dot", "mosaic_gpu"):  # the gradient is rounded to x's type
    unit = NARROW_UNITS["bfloat16"]
  _, _, expected_GDF = oracle(arrays)
  assert_close([dw_GDF], [expected_GDF], unit)


@pytest.mark.parametrize("backend", without("tiled"))
def test_vmap_equals_separate_calls(backend):
  first = make_case("tail", np.float32)
  # The used rows and the groups in reverse, and zeros instead of NaN after them.
  num_unused = 101
  padding = ((0, num_unused), (0, 0))
  second = Arrays(
    x_MD=np.pad(first.x_MD[:-num_unused][::-1], padding),
    w_GDF=first.w_GDF[::-1],
    sizes_G=first.sizes_G[::-1],
    dy_MF=np.pad(first.dy_MF[:-num_unused][::-1], padding),
  )
  multiply = multiplier(backend)

  def all_three(arrays):
    def multiply_groups(x_MD, w_GDF):
      return multiply(x_MD, w_GDF, arrays.sizes_G)

    remade = jax.checkpoint(multiply_groups)
    return value_and_gradients(remade, arrays.x_MD, arrays.w_GDF, arrays.dy_MF)

  together = jax.jit(jax.vmap(all_three))(trees.stack([first, second]))
  for member, arrays in enumerate((first, second)):
    results = [np.asarray(stacked[member]) for stacked in together]
    assert_close(results, oracle(arrays), unit=1e-5)


@pytest.mark.parametrize("backend", without("megablox"))
def test_shards_multiply_their_rows_inside_shard_map(backend):
  mesh = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  num_shards = 8
  num_rows = 40
  draw = np.random.default_rng(1).normal
  x_PMD = draw(size=(num_shards, num_rows, 6))
  dy_PMF = draw(size=(num_shards, num_rows, 4))
  w_PGDF = draw(size=(num_shards, 2, 6, 4))
  draw_integers = np.random.default_rng(2).integers
  whole = Arrays(
    x_MD=x_PMD.astype(np.float32),
    w_GDF=w_PGDF.astype(np.float32),
    sizes_G=draw_integers(0, 18, size=(num_shards, 2), dtype=np.int32),
    dy_MF=dy_PMF.astype(np.float32),
  )

  def multiply(x_pMD, w_pGDF, sizes_pG):
    y_MF = multiplier(backend)(x_pMD[0], w_pGDF[0], sizes_pG[0])
    return y_MF[None]

  # check_vma=False: interpreted kernels do not carry varying axes.
  split = P("expert")
  checked = backend not in INTERPRETED
  sharded = jax.shard_map(multiply, mesh=mesh, in_specs=split, out_specs=split, check_vma=checked)

  @jax.jit
  def all_three(arrays):
    def multiply_groups(x_PMD, w_PGDF):
      return sharded(x_PMD, w_PGDF, arrays.sizes_G)

    return value_and_gradients(multiply_groups, arrays.x_MD, arrays.w_GDF, arrays.dy_MF)

  together = all_three(whole)
  for shard in range(num_shards):
    arrays = jax.tree.map(lambda array, shard=shard: array[shard], whole)
    results = [np.asarray(array[shard]) for array in together]
    assert_close(results, oracle(arrays), unit=1e-5)


@pytest.mark.parametrize(
  ("hardware", "dtype", "backend"),
  [
    (Hardware("cpu"), "bfloat16", "tiled"),
    (Hardware("tpu"), "bfloat16", "megablox"),
    (Hardware("gpu", 9.0), "bfloat16", "mosaic_gpu"),
    (Hardware("gpu", 9.0), "float32", "ragged_dot"),
    (Hardware("gpu", 8.0), "bfloat16", "ragged_dot"),
    (Hardware("gpu", 10.0), "bfloat16", "ragged_dot"),
  ],
)
def test_auto_chooses_by_hardware_and_type(hardware, dtype, backend):
  assert api.resolve_backend("auto", hardware, dtype) == backend


def test_a_named_backend_is_used_and_an_unknown_name_is_an_error():
  for name in GROUPED_MATMUL_BACKENDS:
    assert api.resolve_backend(name, Hardware("cpu"), "float32") == name
  with pytest.raises(
    ValueError, match="'tyled' is not a backend; choose auto or one of: reference"
  ):
    api.resolve_backend("tyled", Hardware("cpu"), "float32")
