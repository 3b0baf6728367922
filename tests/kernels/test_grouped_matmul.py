"""Every backend of grouped_matmul against the reference in float64, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlite.kernels.grouped_matmul.api import BACKENDS, grouped_matmul, resolve_backend

# (rows M, inner D, outer F, sizes): the rows that no group takes hold NaN.
CASES = {
  "uniform": (96, 8, 16, (32, 32, 32)),
  "skewed": (1200, 5, 7, (3, 1090, 0, 90, 17)),
  "one_hot": (130, 8, 4, (0, 0, 130, 0)),
  "empty_ends": (40, 6, 6, (0, 17, 23, 0)),
  "tail": (200, 6, 10, (33, 0, 65, 1)),
  "no_rows_used": (20, 4, 4, (0, 0)),
  "one_row": (1, 3, 5, (0, 1, 0)),
  "no_rows": (0, 4, 6, (0, 0)),
}


def make_case(name, dtype=np.float64):
  """(x_MD, w_GDF, sizes_G, dy_MF) with NaN wherever nothing may be read."""
  num_rows, num_in, num_out, sizes = CASES[name]
  draw = np.random.default_rng(0).normal
  x_MD, dy_MF = draw(size=(num_rows, num_in)), draw(size=(num_rows, num_out))
  x_MD[sum(sizes) :] = np.nan
  dy_MF[sum(sizes) :] = np.inf
  w_GDF = draw(size=(len(sizes), num_in, num_out))
  sizes_G = np.array(sizes, np.int32)
  return x_MD.astype(dtype), w_GDF.astype(dtype), sizes_G, dy_MF.astype(dtype)


def value_and_gradients(function, x_MD, w_GDF, dy_MF):
  y_MF, vjp = jax.vjp(function, x_MD, w_GDF)
  return y_MF, *vjp(dy_MF)


def run(backend, x_MD, w_GDF, sizes_G, dy_MF):
  """(y_MF, dx_MD, dw_GDF)"""

  @jax.jit
  def all_three(x_MD, w_GDF, sizes_G, dy_MF):
    multiply = functools.partial(grouped_matmul, group_sizes_G=sizes_G, backend=backend)
    return value_and_gradients(multiply, x_MD, w_GDF, dy_MF)

  return jax.tree.map(np.asarray, all_three(x_MD, w_GDF, sizes_G, dy_MF))


def oracle(x_MD, w_GDF, sizes_G, dy_MF):
  """The same by one NumPy product per group, in float64."""
  x_MD, w_GDF, dy_MF = (np.asarray(a, np.float64) for a in (x_MD, w_GDF, dy_MF))
  y_MF, dx_MD, dw_GDF = np.zeros_like(dy_MF), np.zeros_like(x_MD), np.zeros_like(w_GDF)
  end = 0
  for group, size in enumerate(sizes_G):
    rows = slice(end, end := end + size)
    y_MF[rows] = x_MD[rows] @ w_GDF[group]
    dx_MD[rows] = dy_MF[rows] @ w_GDF[group].T
    dw_GDF[group] = x_MD[rows].T @ dy_MF[rows]
  return y_MF, dx_MD, dw_GDF


def assert_close(actual, expected, unit):
  """Within `unit` of the largest entry: a sum is rounded like its largest terms."""
  for got, want in zip(actual, expected, strict=True):
    assert got.shape == want.shape
    bound = unit * max(np.abs(want).max(initial=0), 1)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=bound)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_agrees_with_one_product_per_group_in_float64(backend, case):
  with jax.enable_x64(True):
    arrays = make_case(case)
    assert_close(run(backend, *arrays), oracle(*arrays), unit=1e-12)


@pytest.mark.parametrize("case", ["skewed", "tail"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrow_types_lose_only_their_own_rounding(backend, case, dtype):
  arrays = make_case(case, dtype)
  results = run(backend, *arrays)
  assert [a.dtype for a in results] == [dtype] * 3
  # float32: sums of up to 1090 terms. bfloat16: sums in float32, then one rounding of the result.
  unit = 1e-5 if dtype == jnp.float32 else 2.0**-8
  assert_close(results, oracle(*arrays), unit)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weight_gradient_has_the_type_of_the_weights(backend):
  x_MD, w_GDF, sizes_G, dy_MF = make_case("tail", jnp.bfloat16)
  y_MF, dx_MD, dw_GDF = run(backend, x_MD, w_GDF.astype(np.float32), sizes_G, dy_MF)
  assert (y_MF.dtype, dx_MD.dtype, dw_GDF.dtype) == (jnp.bfloat16, jnp.bfloat16, np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_past_the_groups_are_exactly_zero(backend):
  y_MF, dx_MD, dw_GDF = run(backend, *make_case("tail", np.float32))
  assert not y_MF[99:].any()
  assert not dx_MD[99:].any()
  assert not dw_GDF[1].any()
  assert np.isfinite(dw_GDF).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_members_of_an_ensemble_get_what_each_would_alone(backend):
  first = make_case("tail", np.float32)
  second = [a[::-1].copy() for a in (first[0][:99], first[1], first[2], first[3][:99])]
  second[0], second[3] = (np.pad(a, ((0, 101), (0, 0))) for a in (second[0], second[3]))
  stacked = [np.stack(pair) for pair in zip(first, second, strict=True)]
  together = jax.jit(jax.vmap(functools.partial(_three, backend)))(*stacked)
  for member, arrays in enumerate((first, second)):
    assert_close([np.asarray(a[member]) for a in together], run(backend, *arrays), unit=1e-6)


def _three(backend, x_MD, w_GDF, sizes_G, dy_MF):
  multiply = functools.partial(grouped_matmul, group_sizes_G=sizes_G, backend=backend)
  return value_and_gradients(jax.checkpoint(multiply), x_MD, w_GDF, dy_MF)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_shard_multiplies_its_own_rows_inside_shard_map(backend):
  mesh = jax.make_mesh((8,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  num_shards, num_rows = 8, 40
  draw = np.random.default_rng(1).normal
  x_PMD, dy_PMF = draw(size=(num_shards, num_rows, 6)), draw(size=(num_shards, num_rows, 4))
  w_PGDF = draw(size=(num_shards, 2, 6, 4))
  sizes_PG = np.random.default_rng(2).integers(0, 18, size=(num_shards, 2), dtype=np.int32)
  arrays = [a.astype(np.float32) for a in (x_PMD, w_PGDF)] + [sizes_PG, dy_PMF.astype(np.float32)]

  def multiply(x_pMD, w_pGDF, sizes_pG):
    return grouped_matmul(x_pMD[0], w_pGDF[0], sizes_pG[0], backend=backend)[None]

  sharded = jax.shard_map(
    multiply, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=True
  )
  together = jax.jit(
    lambda x, w, sizes, dy: value_and_gradients(lambda x, w: sharded(x, w, sizes), x, w, dy)
  )(*arrays)
  for shard in range(num_shards):
    alone = oracle(*(a[shard] for a in arrays))
    assert_close([np.asarray(a[shard]) for a in together], alone, unit=1e-5)


def test_auto_is_tiled_on_cpu_and_an_unknown_name_is_refused():
  assert resolve_backend("auto", "cpu") == "tiled"
  assert all(resolve_backend(name, "cpu") == name for name in BACKENDS)
  with pytest.raises(ValueError, match="'tyled' is no backend; choose auto or one of: reference"):
    resolve_backend("tyled", "cpu")
