"""One feed-forward network per group of rows, on every backend of `grouped_matmul`.

The contract is that of kernels/grouped_matmul/api.py: group g has the `group_sizes_G[g]` rows that
follow those of group g - 1. Rows past the last group may contain anything, including NaN, in
`x_MD`, in `weight_M` and in the cotangent; they are zero in the result and in the gradients.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tiles
from maxlite.kernels.grouped_mlp import composed, tiled


class Biases(NamedTuple):
  """One row per group for each projection."""

  bi_GF: tuple[jax.Array, ...]
  bo_GD: jax.Array


def grouped_mlp(
  x_MD: jax.Array,
  weight_M: jax.Array,
  wi_GDF: tuple[jax.Array, ...],
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
  *,
  activation: Callable[..., jax.Array],
  biases: Biases | None = None,
  backend: str,
  wi_tiles: Tiles = DEFAULT_TILES,
  wo_tiles: Tiles = DEFAULT_TILES,
) -> jax.Array:
  """y_MD = weight (activation(x wi[0] + bi[0], ...) wo + bo), with each row's group's matrices.

  In x's type, with float32 sums. Gradients of matrices and biases have the types of those. Saved
  for the backward pass: x, weight and the operands of the activation (named "mlpwi").

  Args:
    group_sizes_G: the sum must not exceed M.
    activation: maps len(wi) arrays of one shape to one array, elementwise.
    backend: one of `GROUPED_MATMUL_BACKENDS`.
  """
  group_sizes_G, wi_GDF = group_sizes_G.astype(jnp.int32), tuple(wi_GDF)
  num_rows, dim = x_MD.shape
  num_groups, hidden, _ = wo_GFD.shape
  assert weight_M.shape == (num_rows,), f"{num_rows} rows, weight_M {weight_M.shape}"
  assert wo_GFD.shape[2] == dim, f"wo_GFD {wo_GFD.shape} does not fit x_MD {x_MD.shape}"
  assert all(w.shape == (num_groups, dim, hidden) for w in wi_GDF), [w.shape for w in wi_GDF]
  if backend == "tiled" and biases is None and num_rows:
    return tiled.grouped_mlp(x_MD, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation)
  operands = x_MD, weight_M, wi_GDF, wo_GFD, biases, group_sizes_G
  return composed.grouped_mlp(*operands, activation, backend, [wi_tiles, wo_tiles])
