"""One matrix per group of rows: `y[m] = x[m] @ w[group of m]`.

All `GROUPED_MATMUL_BACKENDS` (backend.py) implement one contract. Group g has the
`group_sizes_G[g]` rows that follow those of group g - 1. Rows past the last group may contain
anything, including NaN, in `x_MD` and in the cotangent; they are zero in the result and in the
gradient. Sums are accumulated in float32 (in float64 if the operands are float64).
"""

import jax
import jax.numpy as jnp

from maxlite import registry
from maxlite.kernels.grouped_matmul.backend import GroupedMatmulBackend
from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tiles
from maxlite.kernels.hardware import Hardware
from maxlite.kernels.quantized import quantized_grouped_matmul
from maxlite.registry import GROUPED_MATMUL_BACKENDS

# Of these, "auto" chooses the first that supports the call.
AUTO = ("tiled", "megablox", "mosaic_gpu", "ragged_dot")


def resolve_backend(name: str, hardware: Hardware, dtype: str) -> str:
  """The backend that `grouped_matmul=name` selects; `auto` chooses by hardware and type of rows.

  Raises:
    UserError: there is no such backend.
  """

  def supports(backend: GroupedMatmulBackend) -> bool:
    return backend.supports(hardware, dtype)

  return registry.resolve_backend("grouped_matmul", GROUPED_MATMUL_BACKENDS, AUTO, name, supports)


def grouped_matmul(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  *,
  backend: str,
  tiles: Tiles = DEFAULT_TILES,
  quantization: str = "",
) -> jax.Array:
  """y_MF in x's type: each row of x times its group's matrix; zero past the last group.

  The gradient of `w_GDF` has w's type. `sum(group_sizes_G)` must not exceed M. With `quantization`
  (an entry of QUANTIZED_TYPES), `backend` computes the gradients only.
  """
  num_groups, num_in, _ = w_GDF.shape
  assert x_MD.ndim == 2, f"x_MD has shape {x_MD.shape}"
  assert x_MD.shape[1] == num_in, f"x_MD {x_MD.shape} does not fit w_GDF {w_GDF.shape}"
  assert group_sizes_G.shape == (num_groups,), f"{num_groups} groups, sizes {group_sizes_G.shape}"
  assert jnp.issubdtype(group_sizes_G.dtype, jnp.integer), group_sizes_G.dtype
  group_sizes_G = group_sizes_G.astype(jnp.int32)
  if quantization and x_MD.size:
    return quantized_grouped_matmul(x_MD, w_GDF, group_sizes_G, tiles, quantization, backend)
  return GROUPED_MATMUL_BACKENDS[backend].run(x_MD, w_GDF, group_sizes_G, tiles)
