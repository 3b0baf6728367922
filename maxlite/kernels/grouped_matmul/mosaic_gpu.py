"""Grouped matmul for Hopper GPUs: JAX's Mosaic GPU kernels with the gradient rule of gradient.py.

The kernels are those of `jax.experimental.pallas.ops.gpu`. They need multiples of 64 on the axes of
the matrices and of 8 rows, so other arrays are padded with zeros. Rows past the last group are
undefined in the results of the kernels, and are zeroed here; grouped_mlp/mosaic_gpu_mlp.py leaves
them. The kernels have no rule for `jax.vmap`, which therefore runs them one after the other.

The kernels do not declare over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False; tests/kernels/test_grouped_matmul.py checks their gradients there.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from maxlite.errors import UserError
from maxlite.kernels.grouped_matmul.gradient import GroupedKernels, grouped_matmul_of
from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tile
from maxlite.kernels.hardware import BLACKWELL, HOPPER, hardware_of
from maxlite.kernels.stated_cost import StatedCost, stated_cost

_MULTIPLE = 64  # of all axes
# The fastest of those tried on an H100 with 32,768 rows of 2048 channels in 64 groups.
_BLOCK_M = 128  # rows of a block of the product
_BLOCK_K = 64  # what is summed over, per step
_NUM_CONCURRENT_STEPS = 5
_GRID_WIDTH = 8  # blocks of columns that are computed one after the other


class Programs(NamedTuple):
  """JAX's kernels; results past the last group are undefined.

  - multiply(x_MD, w_GDF, group_sizes_G, transpose): y_MF in the common type of x and w; with
    `transpose`, y_MD of x_MF times the transposed matrices.
  - sum_outer_products(x_MD, dy_MF, group_sizes_G): dw_GDF in the common type of x and dy.
  """

  multiply: Callable[..., jax.Array]
  sum_outer_products: Callable[..., jax.Array]


def _multiply(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  transpose: bool,
) -> jax.Array:
  from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

  num_out = w_GDF.shape[1] if transpose else w_GDF.shape[2]
  return ragged_dot(
    x_MD,
    w_GDF,
    group_sizes=group_sizes_G,
    block_m=_BLOCK_M,
    block_n=_block_of(num_out),
    block_k=_BLOCK_K,
    max_concurrent_steps=_NUM_CONCURRENT_STEPS,
    grid_block_n=_GRID_WIDTH,
    transpose_rhs=transpose,
  )


def _sum_outer_products(
  x_MD: jax.Array,
  dy_MF: jax.Array,
  group_sizes_G: jax.Array,
) -> jax.Array:
  from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

  # JAX's function asks the first attached device for its number of multiprocessors, although the
  # program may be compiled for an absent GPU.
  devices = [default_device()]
  with mock.patch.object(jax, "devices", return_value=devices):
    return transposed_ragged_dot(
      x_MD,
      dy_MF,
      group_sizes=group_sizes_G,
      block_m=_block_of(x_MD.shape[1]),
      block_n=_block_of(dy_MF.shape[1]),
      block_k=_BLOCK_K,
      max_concurrent_steps=_NUM_CONCURRENT_STEPS,
      grid_block_n=_GRID_WIDTH,
    )


def _block_of(num_columns: int) -> int:
  """The columns of a block, of which there must be a whole number."""
  return 128 if num_columns % 128 == 0 else _MULTIPLE


MOSAIC_GPU = Programs(_multiply, _sum_outer_products)


def grouped_matmul(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tiles: object,
  *,
  programs: Programs = MOSAIC_GPU,
) -> jax.Array:
  """y_MF in x's type, which must have 16 bits; the weight gradient is rounded to x's type.

  `programs` is for tests without a GPU.

  Raises:
    UserError: float32, or devices that the kernels do not support.
  """
  del tiles  # the kernels' are fixed
  num_rows = x_MD.shape[0]
  num_out = w_GDF.shape[2]
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(num_rows, num_out))
  if programs is MOSAIC_GPU:
    check_support(x_MD.dtype)
  kernels = GroupedKernels(
    functools.partial(_multiply_and_zero, programs=programs),
    functools.partial(_sum_in_dtype, programs=programs),
  )
  x_MD = pad_matrix(x_MD)
  w_GDF = jax.vmap(pad_matrix)(w_GDF)
  y_MF = grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, DEFAULT_TILES)
  return y_MF[:num_rows, :num_out]


def check_support(dtype: jnp.dtype) -> None:
  if dtype.itemsize != 2:
    raise UserError(f"grouped_matmul=mosaic_gpu does not support {dtype}; write dtype=bfloat16")
  device = default_device()
  if not HOPPER <= hardware_of(device).compute_capability < BLACKWELL:
    raise UserError(
      f"grouped_matmul=mosaic_gpu is for Hopper GPUs, not for {device.device_kind}; "
      "write grouped_matmul=auto"
    )


def default_device() -> jax.Device:
  """The device that programs are traced for, which may be absent."""
  device = jax.config.jax_default_device
  if isinstance(device, jax.Device):
    return device
  return jax.devices()[0]


def pad_matrix(x_MD: jax.Array) -> jax.Array:
  """A matrix, padded with zeros to multiples of 64 on both axes."""
  num_rows, num_columns = x_MD.shape
  return jnp.pad(x_MD, ((0, -num_rows % _MULTIPLE), (0, -num_columns % _MULTIPLE)))


def _multiply_and_zero(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tile: Tile | None,
  transpose: bool,
  programs: Programs,
) -> jax.Array:
  """`GroupedKernels.multiply_rows`."""
  del tile
  y_MF = multiply_rows(programs, x_MD, w_GDF.astype(x_MD.dtype), group_sizes_G, transpose)
  row_M1 = jnp.arange(len(y_MF), dtype=jnp.int32)[:, None]
  return jnp.where(row_M1 < group_sizes_G.sum(dtype=jnp.int32), y_MF, 0)


def _sum_in_dtype(
  x_MD: jax.Array,
  dy_MF: jax.Array,
  group_sizes_G: jax.Array,
  dtype: jnp.dtype,
  tile: Tile | None,
  programs: Programs,
) -> jax.Array:
  """`GroupedKernels.sum_outer_products`, rounded to the type of x."""
  del tile
  return sum_outer_products(programs, x_MD, dy_MF, group_sizes_G).astype(dtype)


def multiply_rows(
  programs: Programs,
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  transpose: bool,
) -> jax.Array:
  """`Programs.multiply` of operands of one type, with its cost."""
  num_out = w_GDF.shape[1] if transpose else w_GDF.shape[2]
  cost = StatedCost(
    flops=2 * x_MD.size * num_out,
    row_bytes=x_MD.nbytes + x_MD.shape[0] * num_out * x_MD.dtype.itemsize,
    fixed_bytes=w_GDF.nbytes,
  )
  multiply = sequential_vmap(functools.partial(programs.multiply, transpose=transpose))
  with stated_cost(cost), jax.numpy_dtype_promotion("standard"):
    return multiply(x_MD, w_GDF, group_sizes_G)


def sum_outer_products(
  programs: Programs,
  x_MD: jax.Array,
  dy_MF: jax.Array,
  group_sizes_G: jax.Array,
) -> jax.Array:
  """`Programs.sum_outer_products`, with its cost; rows past the last group may be NaN."""
  x_MD = _zero_rest_of_block(x_MD, group_sizes_G)
  dy_MF = _zero_rest_of_block(dy_MF, group_sizes_G)
  num_weights = group_sizes_G.shape[0] * x_MD.shape[1] * dy_MF.shape[1]
  cost = StatedCost(
    flops=2 * x_MD.size * dy_MF.shape[1],
    row_bytes=x_MD.nbytes + dy_MF.nbytes,
    fixed_bytes=num_weights * x_MD.dtype.itemsize,
  )
  run = sequential_vmap(programs.sum_outer_products)
  with stated_cost(cost), jax.numpy_dtype_promotion("standard"):
    return run(x_MD, dy_MF, group_sizes_G)


def _zero_rest_of_block(x_MD: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
  """x with zeros after the last group, up to the end of the block in which the group ends.

  The kernel reads whole blocks, and multiplies the rows of other groups by zero, which does not
  remove NaN. It reads no further block, and XLA updates this one in place.
  """
  end = group_sizes_G.sum(dtype=jnp.int32)
  start = jnp.minimum(end // _BLOCK_K * _BLOCK_K, len(x_MD) - _BLOCK_K)
  block_mD = jax.lax.dynamic_slice_in_dim(x_MD, start, _BLOCK_K)
  row_m1 = start + jnp.arange(_BLOCK_K, dtype=jnp.int32)[:, None]
  block_mD = jnp.where(row_m1 < end, block_mD, 0)
  return jax.lax.dynamic_update_slice_in_dim(x_MD, block_mD, start, axis=0)
