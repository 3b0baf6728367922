"""One feed-forward network per group of rows, on every backend of `grouped_matmul`.

The contract is that of kernels/grouped_matmul/api.py: group g has the `group_sizes_G[g]` rows that
follow those of group g - 1, except that rows past the last group are undefined: they may contain
anything, including NaN, in `x_MD`, in `weight_M`, in the cotangent, in the result and in the
gradients of rows. They affect neither other rows nor the gradients of matrices.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tiles
from maxlite.kernels.grouped_mlp import composed, megablox_mlp, tiled


class Biases(NamedTuple):
  """One row per group for each projection."""

  bi_GF: tuple[jax.Array, ...]
  bo_GD: jax.Array


def grouped_mlp(
  x_M: jax.Array,
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
  quantization: str = "",
  interpret: bool = False,
) -> jax.Array:
  """y_M = weight (activation(x wi[0] + bi[0], ...) wo + bo), with each row's group's matrices.

  In x's shape and type, with float32 sums. Gradients of matrices and biases have the types of
  those. Saved for the backward pass: x, weight and the operands of the activation (named "mlpwi").

  Args:
    x_M: rows [M, D], or [M, L, 128] with D = 128 L, the form in which TPUs exchange rows.
    group_sizes_G: the sum must not exceed M.
    activation: maps len(wi) arrays of one shape to one array, elementwise.
    backend: one of `GROUPED_MATMUL_BACKENDS`.
    quantization: as of `grouped_matmul`.
    interpret: run Megablox without a TPU, for tests.
  """
  group_sizes_G, wi_GDF = group_sizes_G.astype(jnp.int32), tuple(wi_GDF)
  num_rows = x_M.shape[0]
  num_groups, hidden, dim = wo_GFD.shape
  assert weight_M.shape == (num_rows,), f"{num_rows} rows, weight_M {weight_M.shape}"
  assert math.prod(x_M.shape[1:]) == dim, f"wo_GFD {wo_GFD.shape} does not fit x_M {x_M.shape}"
  assert all(w.shape == (num_groups, dim, hidden) for w in wi_GDF), [w.shape for w in wi_GDF]
  operands, tiles = (weight_M, wi_GDF, wo_GFD), (wi_tiles, wo_tiles)
  if backend == "megablox" and num_rows and not quantization:
    operands = *operands, biases, group_sizes_G
    return megablox_mlp.grouped_mlp(x_M, *operands, activation, tiles, interpret)
  x_MD = x_M.reshape(num_rows, dim)
  if backend == "tiled" and biases is None and num_rows and not quantization:
    y_MD = tiled.grouped_mlp(x_MD, *operands, group_sizes_G, activation)
  else:
    operands = *operands, biases, group_sizes_G
    y_MD = composed.grouped_mlp(x_MD, *operands, activation, backend, tiles, quantization)
  return y_MD.reshape(x_M.shape)
