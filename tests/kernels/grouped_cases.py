"""Test cases and a NumPy reference shared by the tests of all grouped_matmul backends.

A backend under test is a function `multiply(x_MD, w_GDF, group_sizes_G) -> y_MF` from `multiplier`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.kernels.grouped_matmul import megablox, mosaic_gpu
from maxlite.kernels.grouped_matmul.api import DEFAULT_TILES, grouped_matmul
from maxlite.kernels.grouped_matmul.tiles import Tiles
from maxlite.registry import GROUPED_MATMUL_BACKENDS


def multiply_by_xla(x_MD, w_GDF, group_sizes_G, transpose):
  """`Programs.multiply` of mosaic_gpu.py; undefined rows are NaN."""
  for num_items in (*x_MD.shape, *w_GDF.shape[1:]):
    assert num_items % 64 == 0, "the kernels need multiples of 64"
  if transpose:
    w_GDF = w_GDF.swapaxes(1, 2)
  y_MF = jax.lax.ragged_dot(x_MD, w_GDF, group_sizes_G)
  row_M1 = np.arange(x_MD.shape[0])[:, None]
  return jnp.where(row_M1 < group_sizes_G.sum(), y_MF, np.nan)


def sum_outer_products_by_xla(x_MD, dy_MF, group_sizes_G):
  """`Programs.sum_outer_products` of mosaic_gpu.py; other groups' rows in a block are times 0."""
  stop_G1 = jnp.cumulative_sum(group_sizes_G)[:, None]
  start_G1 = stop_G1 - group_sizes_G[:, None]
  row_1M = np.arange(x_MD.shape[0])[None]
  is_in_group_GM = (start_G1 <= row_1M) & (row_1M < stop_G1)
  is_read_GM = (start_G1 // 64 * 64 <= row_1M) & (row_1M < (stop_G1 + 63) // 64 * 64)
  is_read_GM &= group_sizes_G[:, None] > 0
  x_GMD = x_MD[None] * is_in_group_GM[:, :, None].astype(x_MD.dtype)
  read_GMD = jnp.where(is_read_GM[:, :, None], x_GMD, 0)
  dy_GMF = jnp.where(is_read_GM[:, :, None], dy_MF[None], 0)
  return jnp.einsum("gmd,gmf->gdf", read_GMD, dy_GMF)


XLA_PROGRAMS = mosaic_gpu.Programs(multiply_by_xla, sum_outer_products_by_xla)
# Hardware kernels: in interpret mode, or by the operations of XLA that replace them on CPUs.
INTERPRETED = {
  "megablox": functools.partial(megablox.grouped_matmul, interpret=True),
  "mosaic_gpu": functools.partial(mosaic_gpu.grouped_matmul, programs=XLA_PROGRAMS),
}
NARROW_ONLY = frozenset(INTERPRETED)  # they have no float64


class Case(NamedTuple):
  """The shape of a grouped matmul; rows past the last group are NaN."""

  num_rows: int
  num_in: int
  num_out: int
  sizes: tuple[int, ...]


CASES = {
  "uniform": Case(96, 8, 16, (32, 32, 32)),
  "skewed": Case(1200, 5, 7, (3, 1090, 0, 90, 17)),
  "large_groups": Case(1700, 5, 7, (700, 0, 860)),
  "one_hot": Case(130, 8, 4, (0, 0, 130, 0)),
  "empty_ends": Case(40, 6, 6, (0, 17, 23, 0)),
  "tail": Case(200, 6, 10, (33, 0, 65, 1)),
  "no_rows_used": Case(20, 4, 4, (0, 0)),
  "one_row": Case(1, 3, 5, (0, 1, 0)),
  "few_rows": Case(42, 5, 7, (0, 11, 0, 3, 16, 0, 8, 1)),
  "no_rows": Case(0, 4, 6, (0, 0)),
}
# Sizes of four groups with up to 200 rows: values of an array, so that one program runs them all.
ROUTINGS = {
  "uniform": (50, 50, 50, 50),
  "skewed": (3, 180, 0, 17),
  "one_hot": (0, 0, 200, 0),
  "empty_ends": (0, 17, 23, 0),
  "tail": (33, 0, 65, 1),
  "aligned": (128, 0, 0, 64),
  "no_rows_used": (0, 0, 0, 0),
}
# float32: sums of up to 1090 terms. bfloat16: sums in float32, then one rounding of the result.
NARROW_UNITS = {"float32": 1e-5, "bfloat16": 2.0**-8}


class Multiplier(NamedTuple):
  """A backend with its tiles; equal ones share compiled programs, of which it is a static part."""

  multiply: Callable
  tiles: Tiles

  def __call__(self, x_MD, w_GDF, group_sizes_G):
    return self.multiply(x_MD, w_GDF, group_sizes_G, tiles=self.tiles)


# One function per backend, which compares equal to itself.
MULTIPLY = {}
for name in GROUPED_MATMUL_BACKENDS:
  MULTIPLY[name] = functools.partial(grouped_matmul, backend=name)
MULTIPLY |= INTERPRETED


def multiplier(backend, tiles=DEFAULT_TILES):
  return Multiplier(MULTIPLY[backend], tiles)


class Arrays(NamedTuple):
  """The operands of a grouped matmul, and a gradient of its result."""

  x_MD: np.ndarray
  w_GDF: np.ndarray
  sizes_G: np.ndarray
  dy_MF: np.ndarray


def make_case(name, dtype=np.float64):
  """Arrays with NaN and infinity in rows that must not be read."""
  return fill_case(CASES[name], dtype)


def fill_case(case, dtype=np.float64):
  """The arrays of `make_case` for any shape."""
  draw = np.random.default_rng(0).normal
  num_used = sum(case.sizes)
  x_MD = draw(size=(case.num_rows, case.num_in))
  dy_MF = draw(size=(case.num_rows, case.num_out))
  x_MD[num_used:] = np.nan
  dy_MF[num_used:] = np.inf
  w_GDF = draw(size=(len(case.sizes), case.num_in, case.num_out))
  return Arrays(
    x_MD=x_MD.astype(dtype),
    w_GDF=w_GDF.astype(dtype),
    sizes_G=np.array(case.sizes, np.int32),
    dy_MF=dy_MF.astype(dtype),
  )


def value_and_gradients(function, x_MD, w_GDF, dy_MF):
  y_MF, vjp = jax.vjp(function, x_MD, w_GDF)
  return y_MF, *vjp(dy_MF)


def run(multiply, arrays):
  """(y_MF, dx_MD, dw_GDF)"""
  return jax.tree.map(np.asarray, _all_three(multiply, arrays))


@functools.partial(jax.jit, static_argnums=0)
def _all_three(multiply, arrays):
  def multiply_groups(x_MD, w_GDF):
    return multiply(x_MD, w_GDF, arrays.sizes_G)

  return value_and_gradients(multiply_groups, arrays.x_MD, arrays.w_GDF, arrays.dy_MF)


def oracle(arrays):
  """The same results from one NumPy product per group, in float64."""
  x_MD = np.asarray(arrays.x_MD, np.float64)
  w_GDF = np.asarray(arrays.w_GDF, np.float64)
  dy_MF = np.asarray(arrays.dy_MF, np.float64)
  y_MF = np.zeros_like(dy_MF)
  dx_MD = np.zeros_like(x_MD)
  dw_GDF = np.zeros_like(w_GDF)
  start = 0
  for group, size in enumerate(arrays.sizes_G):
    rows = slice(start, start + size)
    y_MF[rows] = x_MD[rows] @ w_GDF[group]
    dx_MD[rows] = dy_MF[rows] @ w_GDF[group].T
    dw_GDF[group] = x_MD[rows].T @ dy_MF[rows]
    start += size
  return y_MF, dx_MD, dw_GDF


def assert_close(actual, expected, unit):
  """Within `unit` of the largest entry, because a sum is rounded like its largest terms."""
  for got, want in zip(actual, expected, strict=True):
    assert got.shape == want.shape
    largest = np.abs(want).max(initial=0)
    bound = unit * max(largest, 1)
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=bound)


def assert_right_for_every_routing(multiply, num_in, num_out, dtype):
  for sizes in ROUTINGS.values():
    case = Case(200, num_in, num_out, sizes)
    assert_right(multiply, fill_case(case, dtype))


def assert_right(multiply, arrays):
  """Value and gradients are exact up to one rounding, and exactly zero outside of groups."""
  results = run(multiply, arrays)
  y_MF, dx_MD, dw_GDF = results
  dtype = arrays.x_MD.dtype
  assert y_MF.dtype == dtype
  assert dx_MD.dtype == dtype
  assert dw_GDF.dtype == arrays.w_GDF.dtype
  rounded_GDF = arrays.w_GDF.astype(dtype)
  expected = oracle(arrays._replace(w_GDF=rounded_GDF))
  assert_close(results, expected, NARROW_UNITS[dtype.name])
  num_used = arrays.sizes_G.sum()
  assert not y_MF[num_used:].any()
  assert not dx_MD[num_used:].any()
  assert not dw_GDF[arrays.sizes_G == 0].any()
