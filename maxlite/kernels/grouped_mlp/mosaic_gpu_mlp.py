"""The feed-forward networks for Hopper GPUs: products by Mosaic GPU, and few passes between them.

Rows past the last group are neither zeroed nor masked between the kernels: they are undefined in
the result of each, and no kernel lets them reach another row or a weight.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.grouped_matmul.mosaic_gpu import (
  MOSAIC_GPU,
  Programs,
  check_support,
  multiply_rows,
  pad_matrix,
  sum_outer_products,
)
from maxlite.kernels.grouped_mlp.composed import Activation, weighted

_Arrays = tuple[jax.Array, ...]


class _Residuals(NamedTuple):
  """What the backward pass reads; `up_MF` has the activation's operands, concatenated."""

  x_MD: jax.Array
  up_MF: jax.Array
  weight_M: jax.Array
  wi_GDF: _Arrays
  wo_GFD: jax.Array
  group_sizes_G: jax.Array


def grouped_mlp(
  x_M: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  biases: None,
  group_sizes_G: jax.Array,
  *,
  activation: Activation,
  wi_tiles: object,
  wo_tiles: object,
  programs: Programs = MOSAIC_GPU,
) -> jax.Array:
  """y_M, of x_M's shape and type, without biases; `programs` is for tests without a GPU.

  Raises:
    UserError: float32, or devices that the kernels do not support.
  """
  del biases, wi_tiles, wo_tiles  # the kernels' tiles are fixed
  if programs is MOSAIC_GPU:
    check_support(x_M.dtype)
  num_rows = len(x_M)
  width = wo_GFD.shape[2]
  x_MD = pad_matrix(x_M.reshape(num_rows, width))
  weight_M = jnp.pad(weight_M, (0, len(x_MD) - num_rows))
  wi_GDF = tuple(jax.vmap(pad_matrix)(w_GDF) for w_GDF in wi_GDF)
  wo_GFD = jax.vmap(pad_matrix)(wo_GFD)
  y_MD = _apply(x_MD, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation, programs)
  return y_MD[:num_rows, :width].reshape(x_M.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _apply(
  x_MD: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
  activation: Activation,
  programs: Programs,
) -> jax.Array:
  """y_MD in x's type."""
  y_MD, _ = _forward(x_MD, weight_M, wi_GDF, wo_GFD, group_sizes_G, activation, programs)
  return y_MD


def _forward(
  x_MD: jax.Array,
  weight_M: jax.Array,
  wi_GDF: _Arrays,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
  activation: Activation,
  programs: Programs,
) -> tuple[jax.Array, _Residuals]:
  # As one product, so that x is read once and has one gradient.
  up_MF = multiply_rows(
    programs, x_MD, _concatenate(x_MD.dtype, wi_GDF), group_sizes_G, transpose=False
  )
  up_MF = checkpoint_name(up_MF, "mlpwi")
  h_MF = _hidden(activation, len(wi_GDF), up_MF, weight_M)
  y_MD = multiply_rows(programs, h_MF, wo_GFD.astype(x_MD.dtype), group_sizes_G, transpose=False)
  return y_MD, _Residuals(x_MD, up_MF, weight_M, wi_GDF, wo_GFD, group_sizes_G)


def _backward(
  activation: Activation,
  programs: Programs,
  residuals: _Residuals,
  dy_MD: jax.Array,
) -> tuple[jax.Array, jax.Array, _Arrays, jax.Array, None]:
  x_MD, up_MF, weight_M, wi_GDF, wo_GFD, group_sizes_G = residuals
  multiply = functools.partial(multiply_rows, programs, group_sizes_G=group_sizes_G, transpose=True)
  dh_MF = multiply(dy_MD, wo_GFD.astype(x_MD.dtype))
  # Hidden rows are recomputed where their gradient is there: one pass reads the operands for both.
  up_MF, dh_MF = jax.lax.optimization_barrier((up_MF, dh_MF))
  hidden = functools.partial(_hidden, activation, len(wi_GDF))
  h_MF, hidden_vjp = jax.vjp(hidden, up_MF, weight_M)
  dup_MF, dweight_M = hidden_vjp(dh_MF)
  dwo_GFD = sum_outer_products(programs, h_MF, dy_MD, group_sizes_G)
  dwi_GDF = sum_outer_products(programs, x_MD, dup_MF, group_sizes_G)
  dx_MD = multiply(dup_MF, _concatenate(x_MD.dtype, wi_GDF))
  dwi_by_input = jnp.split(dwi_GDF, len(wi_GDF), axis=2)
  return (
    dx_MD,
    dweight_M,
    tuple(dw.astype(w.dtype) for dw, w in zip(dwi_by_input, wi_GDF, strict=True)),
    dwo_GFD.astype(wo_GFD.dtype),
    None,
  )


_apply.defvjp(_forward, _backward)


def _concatenate(dtype: jnp.dtype, wi_GDF: _Arrays) -> jax.Array:
  """The input projections as one matrix per group, in `dtype`."""
  return jnp.concatenate([w_GDF.astype(dtype) for w_GDF in wi_GDF], axis=2)


def _hidden(
  activation: Activation, num_operands: int, up_MF: jax.Array, weight_M: jax.Array
) -> jax.Array:
  """h_MF of the activation's operands, concatenated in up_MF."""
  return weighted(activation, jnp.split(up_MF, num_operands, axis=1), weight_M)
