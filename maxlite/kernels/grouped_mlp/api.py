"""One feed-forward network per group of rows, on every backend of `grouped_matmul`.

A backend may have a network of its own for plain calls; otherwise the network is composed of the
products of the backend.

The contract is that of kernels/grouped_matmul/api.py: group g has the `group_sizes_G[g]` rows that
follow those of group g - 1, except that rows past the last group are undefined: they may contain
anything, including NaN, in `x_MD`, in `weight_M`, in the cotangent, in the result and in the
gradients of rows. They affect neither other rows nor the gradients of matrices.

Sums are float32 (float64 if the operands are). Gradients of matrices and biases have the types of
those. Saved for the backward pass are x, weight and the operands of the activation (named "mlpwi").
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxlite.kernels.grouped_matmul.tiles import DEFAULT_TILES, Tiles
from maxlite.kernels.grouped_mlp import composed
from maxlite.kernels.grouped_mlp.biases import Adapters, Biases
from maxlite.registry import GROUPED_MATMUL_BACKENDS, imported


def grouped_mlp(
  x_M: jax.Array,
  weight_M: jax.Array,
  wi_GDF: tuple[jax.Array, ...],
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
  *,
  activation: Callable[..., jax.Array],  # elementwise: len(wi) arrays of one shape -> one
  biases: Biases | None = None,
  adapters: Adapters | None = None,
  backend: str,  # one of GROUPED_MATMUL_BACKENDS
  wi_tiles: Tiles = DEFAULT_TILES,
  wo_tiles: Tiles = DEFAULT_TILES,
  quantization: str = "",  # as in grouped_matmul
) -> jax.Array:
  """y_M = weight (activation(x wi[0] + bi[0], ...) wo + bo), in x's shape and type.

  Args:
    x_M: rows [M, D], or [M, L, 128] with D = 128 L, the form in which TPUs exchange rows.
    group_sizes_G: the sum must not exceed M.
    adapters: low-rank changes of the matrices, of which wi and wo are then the first part.
  """
  group_sizes_G = group_sizes_G.astype(jnp.int32)
  _check_shapes(x_M, weight_M, wi_GDF, wo_GFD)
  entry = GROUPED_MATMUL_BACKENDS[backend]
  is_plain = len(x_M) > 0 and adapters is None and not quantization
  if entry.network and is_plain and (biases is None or entry.network_has_biases):
    network = imported(entry.network)
    return network(
      x_M,
      weight_M,
      wi_GDF,
      wo_GFD,
      biases,
      group_sizes_G,
      activation=activation,
      wi_tiles=wi_tiles,
      wo_tiles=wo_tiles,
    )
  y_MD = composed.grouped_mlp(
    x_M.reshape(len(x_M), wo_GFD.shape[2]),
    weight_M,
    wi_GDF,
    wo_GFD,
    biases,
    adapters,
    group_sizes_G,
    activation=activation,
    backend=backend,
    wi_tiles=wi_tiles,
    wo_tiles=wo_tiles,
    quantization=quantization,
  )
  return y_MD.reshape(x_M.shape)


def _check_shapes(
  x_M: jax.Array, weight_M: jax.Array, wi_GDF: tuple[jax.Array, ...], wo_GFD: jax.Array
) -> None:
  num_rows = x_M.shape[0]
  num_groups, hidden, dim = wo_GFD.shape
  assert weight_M.shape == (num_rows,), f"{num_rows} rows, weight_M {weight_M.shape}"
  assert math.prod(x_M.shape[1:]) == dim, f"wo_GFD {wo_GFD.shape} does not fit x_M {x_M.shape}"
  for wi in wi_GDF:
    assert wi.shape == (num_groups, dim, hidden), f"wi_GDF {wi.shape}, wo_GFD {wo_GFD.shape}"
