"""The feed-forward networks as grouped matmuls of any backend."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.grouped_matmul.api import grouped_matmul
from maxlite.kernels.numerics import accumulator_dtype


def grouped_mlp(
  x_MD, weight_M, wi_GDF, wo_GFD, biases, group_sizes_G, activation, backend, tiles, quantization
) -> jax.Array:
  """y_MD in x's type; `tiles` of wi and wo. Biases are not quantized."""
  multiply = functools.partial(grouped_matmul, backend=backend)
  multiply_wi, multiply_wo = (
    functools.partial(multiply, tiles=each, quantization=quantization) for each in tiles
  )
  # As one product, so that x is read once and has one gradient.
  up_MF = multiply_wi(x_MD, jnp.concatenate(wi_GDF, axis=2), group_sizes_G)
  if biases is not None:
    # As grouped products with a column of ones, which exclude rows past the groups in both passes.
    ones_M1 = jnp.ones_like(x_MD[:, :1])
    up_MF += multiply(ones_M1, jnp.concatenate(biases.bi_GF, axis=1)[:, None], group_sizes_G)
  up_MF = checkpoint_name(up_MF, "mlpwi")
  y_MD = _down(up_MF, weight_M, wo_GFD, group_sizes_G, activation, multiply_wo)
  if biases is not None:
    y_MD += multiply(weight_M.astype(x_MD.dtype)[:, None], biases.bo_GD[:, None], group_sizes_G)
  return y_MD


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _down(up_MF, weight_M, wo_GFD, group_sizes_G, activation, multiply):
  """y_MD; the gradient saves the operands, and recomputes the weighted hidden rows."""
  return multiply(_hidden(activation, wo_GFD.shape[1], up_MF, weight_M), wo_GFD, group_sizes_G)


def _hidden(activation, width: int, up_MF, weight_M) -> jax.Array:
  """h_MF of the activation's operands, concatenated in up_MF, each of `width` columns."""
  return weighted(activation, jnp.split(up_MF, up_MF.shape[1] // width, axis=1), weight_M)


def weighted(activation, up_MF, weight_M) -> jax.Array:
  """h_MF: the hidden rows, each multiplied by its weight in float32."""
  h_MF = activation(*up_MF)
  dtype = accumulator_dtype(h_MF.dtype)
  return (h_MF.astype(dtype) * weight_M.astype(dtype)[:, None]).astype(h_MF.dtype)


def _down_forward(up_MF, weight_M, wo_GFD, group_sizes_G, activation, multiply):
  operands = up_MF, weight_M, wo_GFD, group_sizes_G
  return _down(*operands, activation, multiply), operands


def _down_backward(activation, multiply, residuals, dy_MD):
  # The barrier makes XLA recompute the hidden rows, which is cheaper than saving them; without it,
  # XLA would reuse those of the forward pass.
  up_MF, weight_M, wo_GFD, group_sizes_G = jax.lax.optimization_barrier(residuals)
  hidden = functools.partial(_hidden, activation, wo_GFD.shape[1])
  h_MF, hidden_vjp = jax.vjp(hidden, up_MF, weight_M)
  product = functools.partial(multiply, group_sizes_G=group_sizes_G)
  dh_MF, dwo_GFD = jax.vjp(product, h_MF, wo_GFD)[1](dy_MD)
  return *hidden_vjp(dh_MF), dwo_GFD, None


_down.defvjp(_down_forward, _down_backward)
