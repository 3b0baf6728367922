"""The feed-forward networks for CPUs: everything for a tile of rows while it is in the cache.

The activation's operands are the only hidden rows stored as whole arrays, and only the tiles of
groups are touched. The forward pass computes them in a separate loop, so that rematerialization
does not repeat the rest.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.grouped_matmul.tiled import for_tiles
from maxlite.kernels.grouped_mlp.composed import weighted
from maxlite.kernels.numerics import accumulator_dtype, dot
from maxlite.kernels.xla_cpu import materialized_transpose, pack, unpack


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def grouped_mlp(
  x_MD, weight_M, wi_GDF: tuple, wo_GFD, group_sizes_G, activation: Callable[..., jax.Array]
) -> jax.Array:
  """y_MD in x's type, without biases."""
  return _forward(x_MD, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation)[0]


def _forward(x_MD, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation) -> tuple:
  up_MF = jax.custom_batching.sequential_vmap(_up)(x_MD, wi_GDF, group_sizes_G)
  up_MF = tuple(checkpoint_name(up, "mlpwi") for up in up_MF)
  down = jax.custom_batching.sequential_vmap(functools.partial(_down, activation))
  y_MD = down(up_MF, weight_M, wo_GFD, group_sizes_G)
  return y_MD, (x_MD, up_MF, weight_M, wi_GDF, wo_GFD, group_sizes_G)


def _backward(activation, residuals, dy_MD) -> tuple:
  *_, wi_GDF, wo_GFD, _ = residuals
  gradients = jax.custom_batching.sequential_vmap(functools.partial(_gradients, activation))
  dx_MD, dweight_M, dwi_GDF, dwo_GFD = gradients(*residuals, dy_MD)
  dwi_GDF = tuple(dw.astype(w.dtype) for dw, w in zip(dwi_GDF, wi_GDF, strict=True))
  return dx_MD, dweight_M, dwi_GDF, dwo_GFD.astype(wo_GFD.dtype), None


grouped_mlp.defvjp(_forward, _backward)


def _up(x_MD, wi_GDF, group_sizes_G) -> tuple[jax.Array, ...]:
  """up_MF: the activation's operands."""
  dtype, num_rows = x_MD.dtype, x_MD.shape[0]
  x_MD = pack(x_MD)

  def body(tile, wi_DF, up_MF):
    x_mD = tile.read(x_MD, dtype)
    up_mF = (dot(x_mD, unpack(w_DF, dtype), (1, 0)).astype(dtype) for w_DF in wi_DF)
    return tuple(map(tile.write, up_MF, up_mF))

  up_MF = tuple(jnp.zeros_like(x_MD, shape=(num_rows, w.shape[2])) for w in wi_GDF)
  wi_GDF = tuple(pack(w.astype(dtype)) for w in wi_GDF)
  up_MF = for_tiles(body, up_MF, wi_GDF, group_sizes_G, num_rows)
  return tuple(unpack(up, dtype) for up in up_MF)


def _down(activation, up_MF, weight_M, wo_GFD, group_sizes_G) -> jax.Array:
  """y_MD"""
  dtype, num_rows = up_MF[0].dtype, weight_M.shape[0]
  up_MF = tuple(map(pack, up_MF))

  def body(tile, matrices, y_MD):
    up_mF = [tile.read(up, dtype) for up in up_MF]
    h_mF = weighted(activation, up_mF, tile.read(weight_M, weight_M.dtype))
    return tile.write(y_MD, dot(h_mF, unpack(matrices[0], dtype), (1, 0)).astype(dtype))

  y_MD = jnp.zeros_like(up_MF[0], shape=(num_rows, wo_GFD.shape[2]))
  wo_GFD = pack(wo_GFD.astype(dtype))
  return unpack(for_tiles(body, y_MD, (wo_GFD,), group_sizes_G, num_rows), dtype)


def _gradients(activation, x_MD, up_MF, weight_M, wi_GDF, wo_GFD, group_sizes_G, dy_MD) -> tuple:
  """(dx_MD, dweight_M, dwi_GDF, dwo_GFD); those of matrices in the accumulator type."""
  dtype, num_rows = x_MD.dtype, x_MD.shape[0]
  x_MD, dy_MD, up_MF = pack(x_MD), pack(dy_MD), tuple(map(pack, up_MF))
  hidden = functools.partial(weighted, activation)

  def body(tile, matrices, gradients):
    dx_MD, dweight_M, dwi_GDF, dwo_GFD = gradients
    *wi_DF, wo_FD = (unpack(w, dtype) for w in matrices)
    x_mD, dy_mD = tile.read(x_MD, dtype), tile.read(dy_MD, dtype)
    up_mF = tuple(tile.read(up, dtype) for up in up_MF)
    h_mF, hidden_vjp = jax.vjp(hidden, up_mF, tile.read(weight_M, weight_M.dtype))
    dup_mF, dweight_m = hidden_vjp(dot(dy_mD, wo_FD, (1, 1)).astype(dtype))
    dx_mD = sum(map(functools.partial(dot, contract=(1, 1)), dup_mF, wi_DF)).astype(dtype)
    x_Dm, h_Fm = materialized_transpose(x_mD), materialized_transpose(h_mF)
    return (
      tile.write(dx_MD, dx_mD),
      tile.write(dweight_M, dweight_m),
      tuple(tile.add(dw, dot(x_Dm, dup, (1, 0))) for dw, dup in zip(dwi_GDF, dup_mF, strict=True)),
      tile.add(dwo_GFD, dot(h_Fm, dy_mD, (1, 0))),
    )

  sums = functools.partial(jnp.zeros_like, dtype=accumulator_dtype(dtype))
  gradients = jnp.zeros_like(x_MD), jnp.zeros_like(weight_M), tuple(map(sums, wi_GDF)), sums(wo_GFD)
  matrices = tuple(pack(w.astype(dtype)) for w in (*wi_GDF, wo_GFD))
  dx_MD, *others = for_tiles(body, gradients, matrices, group_sizes_G, num_rows)
  return unpack(dx_MD, dtype), *others
