"""JAX's Mosaic GPU kernels as the backend of grouped_matmul: interpreted, refused, compiled.

With XLA's operations in place of the kernels, test_grouped_matmul.py tests the rest of the backend.
"""

from types import SimpleNamespace

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
from grouped_cases import XLA_PROGRAMS, Case, assert_close, fill_case, make_case, oracle
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.slow_cases import fast_only

from maxlite.errors import UserError
from maxlite.kernels.grouped_matmul import mosaic_gpu
from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES

# Groups that begin and end inside of blocks of 64 and 128 rows, at their bounds, and empty ones.
INTERPRETED_CASES = {
  "inside_of_blocks": Case(192, 64, 128, (92, 61, 2, 0, 30, 1)),
  "at_bounds": Case(384, 128, 64, (0, 128, 64, 0, 192, 0)),
  "one_row": Case(64, 64, 64, (0, 1, 0)),
}


@pytest.fixture
def interpreter(monkeypatch):
  """Runs kernels without a GPU; one at a time, because its state is that of the process."""
  if not hasattr(plgpu, "force_gpu_interpret_mode"):
    pytest.skip("this version of JAX has no interpreter for Mosaic GPU programs")
  gpu = SimpleNamespace(core_count=2)
  monkeypatch.setattr(mosaic_gpu, "default_device", lambda: gpu)
  with plgpu.force_gpu_interpret_mode():
    yield


def run_kernel(function, *operands):
  return np.asarray(jax.jit(function)(*operands))


@pytest.mark.usefixtures("interpreter")
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of rows without a group
@pytest.mark.parametrize("name", fast_only(INTERPRETED_CASES, "inside_of_blocks"))
def test_the_kernels_equal_one_product_per_group(name):
  case = INTERPRETED_CASES[name]
  arrays = fill_case(case, jnp.bfloat16)
  sizes_G = arrays.sizes_G
  num_used = sizes_G.sum()

  def multiply(x_MD, w_GDF):
    return mosaic_gpu.MOSAIC_GPU.multiply(x_MD, w_GDF, sizes_G, transpose=False)

  def multiply_transposed(dy_MF, w_GDF):
    return mosaic_gpu.MOSAIC_GPU.multiply(dy_MF, w_GDF, sizes_G, transpose=True)

  def sum_outer_products(x_MD, dy_MF):
    return mosaic_gpu.sum_outer_products(mosaic_gpu.MOSAIC_GPU, x_MD, dy_MF, sizes_G)

  y_MF = run_kernel(multiply, arrays.x_MD, arrays.w_GDF)
  dx_MD = run_kernel(multiply_transposed, arrays.dy_MF, arrays.w_GDF)
  dw_GDF = run_kernel(sum_outer_products, arrays.x_MD, arrays.dy_MF)
  want_MF, want_MD, want_GDF = oracle(arrays)
  results = [y_MF[:num_used], dx_MD[:num_used], dw_GDF]
  assert_close(results, [want_MF[:num_used], want_MD[:num_used], want_GDF], unit=2.0**-8)
  assert not dw_GDF[sizes_G == 0].any()


def multiply_groups(dtype, programs=mosaic_gpu.MOSAIC_GPU):
  arrays = make_case("tail", dtype)
  return mosaic_gpu.grouped_matmul(
    arrays.x_MD, arrays.w_GDF, arrays.sizes_G, DEFAULT_TILES, programs=programs
  )


def test_float32_is_an_error():
  with pytest.raises(UserError, match="mosaic_gpu does not support float32; write dtype=bfloat16"):
    multiply_groups(jnp.float32)


def test_other_devices_are_an_error():
  with pytest.raises(
    UserError, match=r"is for Hopper GPUs, not for cpu; write grouped_matmul=auto"
  ):
    multiply_groups(jnp.bfloat16)


def test_the_devices_of_jax_are_as_before_if_a_kernel_fails():
  """The device of JAX's kernel may be another one than those that are attached."""
  devices = jax.devices
  x_MD = jnp.ones((64, 64), jnp.bfloat16)
  with pytest.raises(AttributeError):  # a CPU has no number of multiprocessors
    mosaic_gpu.MOSAIC_GPU.sum_outer_products(x_MD, x_MD, jnp.array([64]))
  assert jax.devices is devices
  assert multiply_groups(jnp.bfloat16, XLA_PROGRAMS).shape == (200, 10)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
  ("num_rows", "num_in", "num_out", "num_groups"),
  [(49_152, 2048, 1408, 64), (16_384, 4096, 14_336, 8), (1001, 1, 100, 4)],
)
@pytest.mark.parametrize("num_members", [None, 3])
def test_grouped_matmul_compiles_to_three_kernels(
  num_rows, num_in, num_out, num_groups, num_members
):
  """Also for the members of an ensemble, one after the other."""
  sizes_G = np.full(num_groups, num_rows // num_groups, np.int32)

  def run(x_MD, w_GDF):
    return mosaic_gpu.grouped_matmul(x_MD, w_GDF, sizes_G, DEFAULT_TILES)

  shapes = [(num_rows, num_in), (num_groups, num_in, num_out)]
  if num_members:
    run = jax.vmap(run)
    shapes = [(num_members, *shape) for shape in shapes]
  with trace_for_absent_gpu():
    compiled = compile_gradients(run, shapes)
  assert count_kernels(compiled) == 3
