"""Grouped matmul for Hopper GPUs: tokamax's kernels with the gradient rule of gradient.py.

tokamax's function takes the dimension numbers of `jax.lax.ragged_dot_general`, so that the product
with transposed matrices and the sum of outer products within groups are calls of it too. The
kernels need multiples of 64 on all axes, so other arrays are padded with zeros. Rows past the last
group are undefined in the results of the kernels, and are zeroed.

The kernels do not declare over which mesh axes their results vary, so `jax.shard_map` around them
needs check_vma=False; tests/kernels/test_grouped_matmul.py checks their gradients there.
"""

import functools

import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.kernels.grouped_matmul.gradient import GroupedKernels, grouped_matmul_of
from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tile
from maxlite.kernels.stated_cost import StatedCost, stated_cost
from maxlite.kernels.tokamax_library import KERNELS, import_tokamax

_MULTIPLE = 64  # of every axis of the kernels' operands

# The axes that are summed over, of the first and of the second operand.
_ROWS_BY_MATRICES = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(([1], [1]), ([], [])),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[0],
)
_ROWS_BY_TRANSPOSED_MATRICES = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(([1], [2]), ([], [])),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[0],
)
_OUTER_PRODUCTS = jax.lax.RaggedDotDimensionNumbers(
  dot_dimension_numbers=(([0], [0]), ([], [])),
  lhs_ragged_dimensions=[0],
  rhs_group_dimensions=[],
)


def grouped_matmul(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tiles: object,
  *,
  implementation: str = KERNELS,
) -> jax.Array:
  """y_MF in x's type, which must have 16 bits; `implementation` is for tests without a GPU.

  Raises:
    UserError: float32, or devices that the kernels do not support.
  """
  del tiles  # tokamax chooses its own
  num_rows = x_MD.shape[0]
  num_out = w_GDF.shape[2]
  if x_MD.size == 0:
    return jnp.zeros_like(x_MD, shape=(num_rows, num_out))
  if implementation == KERNELS and x_MD.dtype.itemsize != 2:
    raise UserError(f"grouped_matmul=tokamax does not support {x_MD.dtype}; write dtype=bfloat16")
  kernels = GroupedKernels(
    functools.partial(_multiply_rows, implementation=implementation),
    functools.partial(_sum_outer_products, implementation=implementation),
  )
  x_MD = _pad(x_MD)
  w_GDF = jax.vmap(_pad)(w_GDF)
  y_MF = grouped_matmul_of(kernels, x_MD, w_GDF, group_sizes_G, DEFAULT_TILES)
  return y_MF[:num_rows, :num_out]


def _pad(x_MD: jax.Array) -> jax.Array:
  """A matrix, padded with zeros to multiples of 64 on both axes."""
  num_rows, num_columns = x_MD.shape
  return jnp.pad(x_MD, ((0, -num_rows % _MULTIPLE), (0, -num_columns % _MULTIPLE)))


def _multiply_rows(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  tile: Tile | None,
  transpose: bool,
  implementation: str,
) -> jax.Array:
  """`GroupedKernels.multiply_rows` by tokamax, which chooses its tiles itself."""
  del tile
  numbers = _ROWS_BY_TRANSPOSED_MATRICES if transpose else _ROWS_BY_MATRICES
  w_GDF = w_GDF.astype(x_MD.dtype)
  num_out = w_GDF.shape[1] if transpose else w_GDF.shape[2]
  cost = StatedCost(
    flops=2 * x_MD.size * num_out,
    row_bytes=x_MD.nbytes + x_MD.shape[0] * num_out * x_MD.dtype.itemsize,
    fixed_bytes=w_GDF.nbytes,
  )
  with stated_cost(cost):
    y_MF = _ragged_dot(x_MD, w_GDF, group_sizes_G, numbers, x_MD.dtype, implementation)
  return _zero_past_groups(y_MF, group_sizes_G)


def _sum_outer_products(
  x_MD: jax.Array,
  dy_MF: jax.Array,
  group_sizes_G: jax.Array,
  dtype: jnp.dtype,
  tile: Tile | None,
  implementation: str,
) -> jax.Array:
  """`GroupedKernels.sum_outer_products` by tokamax, which chooses its tiles itself."""
  del tile
  # Undefined rows may be NaN, which a product with zero does not remove.
  x_MD = _zero_past_groups(x_MD, group_sizes_G)
  dy_MF = _zero_past_groups(dy_MF, group_sizes_G)
  num_weights = group_sizes_G.shape[0] * x_MD.shape[1] * dy_MF.shape[1]
  cost = StatedCost(
    flops=2 * x_MD.size * dy_MF.shape[1],
    row_bytes=x_MD.nbytes + dy_MF.nbytes,
    fixed_bytes=num_weights * jnp.dtype(dtype).itemsize,
  )
  with stated_cost(cost):
    return _ragged_dot(x_MD, dy_MF, group_sizes_G, _OUTER_PRODUCTS, dtype, implementation)


def _zero_past_groups(x_MD: jax.Array, group_sizes_G: jax.Array) -> jax.Array:
  """The rows of the groups; rows past the last group are zero."""
  row_M1 = jnp.arange(x_MD.shape[0], dtype=jnp.int32)[:, None]
  return jnp.where(row_M1 < group_sizes_G.sum(dtype=jnp.int32), x_MD, 0)


def _ragged_dot(
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes_G: jax.Array,
  numbers: jax.lax.RaggedDotDimensionNumbers,
  dtype: jnp.dtype,
  implementation: str,
) -> jax.Array:
  """The product in `dtype`.

  Raises:
    UserError: tokamax does not support it on these devices.
  """
  tokamax = import_tokamax("grouped_matmul")
  try:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
      return tokamax.ragged_dot_general(
        lhs,
        rhs,
        group_sizes_G,
        numbers,
        precision=jax.lax.Precision.DEFAULT,  # the kernels refuse others
        preferred_element_type=dtype,
        implementation=implementation,
      )
  except NotImplementedError as error:
    raise UserError(f"grouped_matmul=tokamax: {error} Write grouped_matmul=ragged_dot") from error
