"""One matrix per group of rows: `y[m] = x[m] @ w[group of m]`, on every backend alike.

`BACKENDS` share one contract. The rows of group g are the `group_sizes_G[g]` rows after those of
the groups before it. Rows past the last group may hold anything, NaN included, in `x_MD` and in
the cotangent: they are zero in the result and in the gradient. Sums are accumulated in float32 (in
float64 if that is the operands' type).
"""

import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.kernels.grouped_matmul import megablox, ragged_dot, reference, tiled, triton
from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tiles

BACKENDS = {
  "reference": reference.grouped_matmul,
  "tiled": tiled.grouped_matmul,
  "megablox": megablox.grouped_matmul,
  "triton": triton.grouped_matmul,
  "ragged_dot": ragged_dot.grouped_matmul,
}


# By platform; `ragged_dot` where none is named.
AUTO = {"cpu": "tiled", "tpu": "megablox", "gpu": "triton"}

# Backends whose kernels carry no types that say which values differ between shards.
WITHOUT_VMA = frozenset({"megablox"})


def resolve_backend(name: str, platform: str) -> str:
  """The backend that `name` stands for on `platform` (`cpu`, `gpu`, `tpu`).

  Raises:
    UserError: if there is no such backend.
  """
  if name == "auto":
    return AUTO.get(platform, "ragged_dot")
  if name not in BACKENDS:
    known = ", ".join(BACKENDS)
    raise UserError(f"grouped_matmul={name!r} is no backend; choose auto or one of: {known}")
  return name


def grouped_matmul(
  x_MD: jax.Array,
  w_GDF: jax.Array,
  group_sizes_G: jax.Array,
  *,
  backend: str,
  tiles: Tiles = DEFAULT_TILES,
) -> jax.Array:
  """y_MF in x's type, each row of x times the matrix of its group; zero past the last group.

  The gradient of `w_GDF` comes in w's type. `sum(group_sizes_G)` must not exceed M.
  """
  num_groups, num_in, _ = w_GDF.shape
  assert x_MD.ndim == 2, f"x_MD has shape {x_MD.shape}"
  assert x_MD.shape[1] == num_in, f"x_MD {x_MD.shape} does not fit w_GDF {w_GDF.shape}"
  assert group_sizes_G.shape == (num_groups,), f"{num_groups} groups, sizes {group_sizes_G.shape}"
  assert jnp.issubdtype(group_sizes_G.dtype, jnp.integer), group_sizes_G.dtype
  return BACKENDS[backend](x_MD, w_GDF, group_sizes_G.astype(jnp.int32), tiles)
