"""Grouped matmul of quantized operands: XLA's ragged dot, with the gradients of any backend.

A row has one scale, and so has the matrix of a group: a scale per column would have to be gathered
for every row.
"""

import functools

import jax
import jax.numpy as jnp

from maxlite.config.registry import GROUPED_MATMUL_BACKENDS
from maxlite.kernels.grouped_matmul.tiles import Tiles
from maxlite.kernels.quantized import QUANTIZED_TYPES, quantize
from maxlite.kernels.stated_cost import StatedCost, stated_cost


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: Tiles, kind: str, backend: str
) -> jax.Array:
  """y_MF in x's type, of operands quantized to `kind`; `backend` computes the gradients."""
  x, w = quantize(x_MD, kind, (1,)), quantize(w_GDF, kind, (1, 2))
  num_rows, num_out, sum_dtype = x_MD.shape[0], w_GDF.shape[2], QUANTIZED_TYPES[kind].sum_dtype
  row_bytes = num_rows * num_out * sum_dtype.itemsize + x.values.nbytes
  with stated_cost(StatedCost(2 * x_MD.size * num_out, row_bytes, w.values.nbytes)):
    y_MF = jax.lax.ragged_dot(x.values, w.values, group_sizes_G, preferred_element_type=sum_dtype)
  # Rows past the last group repeat the last scale; they are masked.
  scale_M = jnp.repeat(w.scale[:, 0, 0], group_sizes_G, total_repeat_length=num_rows)
  live_M = jnp.arange(num_rows, dtype=jnp.int32) < group_sizes_G.sum(dtype=jnp.int32)
  y_MF = y_MF.astype(jnp.float32) * (x.scale * scale_M[:, None])
  return jnp.where(live_M[:, None], y_MF, 0).astype(x_MD.dtype)


def _forward(x_MD, w_GDF, group_sizes_G, tiles, kind, backend):
  y_MF = grouped_matmul(x_MD, w_GDF, group_sizes_G, tiles, kind, backend)
  return y_MF, (x_MD, w_GDF, group_sizes_G)


def _backward(tiles, kind, backend, residuals, dy_MF):
  x_MD, w_GDF, group_sizes_G = residuals
  x_MD = quantize(x_MD, kind, (1,)).dequantize(x_MD.dtype)
  w_GDF = quantize(w_GDF, kind, (1, 2)).dequantize(w_GDF.dtype)
  multiply = lambda x, w: GROUPED_MATMUL_BACKENDS[backend](x, w, group_sizes_G, tiles)
  return *jax.vjp(multiply, x_MD, w_GDF)[1](dy_MF), None


grouped_matmul.defvjp(_forward, _backward)
