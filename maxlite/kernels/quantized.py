"""Quantization to int8 or fp8 with scales computed from the data.

An array is divided by its largest magnitude along the contracted axis, times the largest number of
the type, and rounded. Inside `shard_map` that axis is the shard's part of it. A product of int8
values is summed exactly in int32, one of fp8 values (e4m3) in float32. Gradients are
straight-through: those of the unquantized product at the quantized operands.

Source: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons (2013), for
the straight-through estimator; Micikevicius et al., FP8 Formats for Deep Learning (2022), for e4m3.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.kernels.grouped_matmul.tiles import Tiles
from maxlite.kernels.stated_cost import StatedCost, stated_cost
from maxlite.registry import GROUPED_MATMUL_BACKENDS


class QuantizedType(NamedTuple):
  """A narrow type, its largest number, and the type in which products are summed."""

  dtype: jnp.dtype
  largest: float
  sum_dtype: jnp.dtype


QUANTIZED_TYPES = {
  "int8": QuantizedType(jnp.dtype(jnp.int8), 127, jnp.dtype(jnp.int32)),
  "fp8": QuantizedType(jnp.dtype(jnp.float8_e4m3fn), 448, jnp.dtype(jnp.float32)),
}


class Quantized(NamedTuple):
  """values * scale"""

  values: jax.Array
  scale: jax.Array  # float32; axes that share a scale have size 1

  def dequantize(self, dtype: jnp.dtype) -> jax.Array:
    return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def quantize(x: jax.Array, kind: str, axes: Sequence[int]) -> Quantized:
  """x rounded to an entry of QUANTIZED_TYPES, with one scale along `axes`.

  A scale is not finite if an element is not, and neither is then any product.
  """
  dtype, largest, _ = QUANTIZED_TYPES[kind]
  x = x.astype(jnp.float32)
  peak = jnp.max(jnp.abs(x), axis=tuple(axes), keepdims=True)
  scale = jnp.where(peak == 0, 1, peak / largest)
  values = jnp.clip(x / scale, -largest, largest)
  if jnp.issubdtype(dtype, jnp.integer):
    values = jnp.round(values)
  return Quantized(values.astype(dtype), scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def quantized_matmul(
  matmul: Callable[..., jax.Array],
  x_TD: jax.Array,
  w_DF: jax.Array,
  out_dtype: jnp.dtype | None,
  kind: str,
) -> jax.Array:
  """y_TF of quantized operands; one scale per row of x and column of w.

  The gradients are those of `matmul(x, w, out_dtype)` at the quantized operands.

  Args:
    matmul: the product of unquantized operands.
    x_TD, w_DF: the operands before quantization.
    out_dtype: type of the result; None: that of x.
    kind: an entry of QUANTIZED_TYPES.
  """
  x = _quantize_rows(x_TD, kind)
  w = _quantize_columns(w_DF, kind)
  y_TF = jax.lax.dot_general(
    x.values,
    w.values,
    dimension_numbers=(((1,), (0,)), ((), ())),
    preferred_element_type=QUANTIZED_TYPES[kind].sum_dtype,
  )
  return (y_TF.astype(jnp.float32) * x.scale * w.scale).astype(out_dtype or x_TD.dtype)


def _quantize_rows(x_TD: jax.Array, kind: str) -> Quantized:
  return quantize(x_TD, kind, axes=(1,))


def _quantize_columns(w_DF: jax.Array, kind: str) -> Quantized:
  return quantize(w_DF, kind, axes=(0,))


def _forward(
  matmul: Callable[..., jax.Array],
  x_TD: jax.Array,
  w_DF: jax.Array,
  out_dtype: jnp.dtype | None,
  kind: str,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return quantized_matmul(matmul, x_TD, w_DF, out_dtype, kind), (x_TD, w_DF)


def _backward(
  matmul: Callable[..., jax.Array],
  out_dtype: jnp.dtype | None,
  kind: str,
  operands: tuple[jax.Array, jax.Array],
  dy_TF: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  x_TD, w_DF = operands
  x_TD = _quantize_rows(x_TD, kind).dequantize(x_TD.dtype)
  w_DF = _quantize_columns(w_DF, kind).dequantize(w_DF.dtype)
  _, vjp = jax.vjp(lambda x, w: matmul(x, w, out_dtype), x_TD, w_DF)
  return vjp(dy_TF)


quantized_matmul.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def quantized_grouped_matmul(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: Tiles, kind: str, backend: str
) -> jax.Array:
  """y_MF in x's type, of operands quantized to `kind`, by XLA's ragged dot.

  `backend` computes the gradients. A row has one scale, and so has the matrix of a group: a scale
  per column would have to be gathered for every row.
  """
  x = _quantize_rows(x_MD, kind)
  w = _quantize_matrices(w_GDF, kind)
  num_rows = x_MD.shape[0]
  num_out = w_GDF.shape[2]
  sum_dtype = QUANTIZED_TYPES[kind].sum_dtype
  cost = StatedCost(
    flops=2 * x_MD.size * num_out,
    row_bytes=num_rows * num_out * sum_dtype.itemsize + x.values.nbytes,
    fixed_bytes=w.values.nbytes,
  )
  with stated_cost(cost):
    y_MF = jax.lax.ragged_dot(x.values, w.values, group_sizes_G, preferred_element_type=sum_dtype)
  # Rows past the last group repeat the last scale; they are masked.
  scale_M = jnp.repeat(w.scale[:, 0, 0], group_sizes_G, total_repeat_length=num_rows)
  live_M = jnp.arange(num_rows, dtype=jnp.int32) < group_sizes_G.sum(dtype=jnp.int32)
  y_MF = y_MF.astype(jnp.float32) * (x.scale * scale_M[:, None])
  return jnp.where(live_M[:, None], y_MF, 0).astype(x_MD.dtype)


def _quantize_matrices(w_GDF: jax.Array, kind: str) -> Quantized:
  return quantize(w_GDF, kind, axes=(1, 2))


class _GroupedOperands(NamedTuple):
  """What the backward pass reads."""

  x_MD: jax.Array
  w_GDF: jax.Array
  group_sizes_G: jax.Array


def _grouped_forward(
  x_MD: jax.Array, w_GDF: jax.Array, group_sizes_G: jax.Array, tiles: Tiles, kind: str, backend: str
) -> tuple[jax.Array, _GroupedOperands]:
  y_MF = quantized_grouped_matmul(x_MD, w_GDF, group_sizes_G, tiles, kind, backend)
  return y_MF, _GroupedOperands(x_MD, w_GDF, group_sizes_G)


def _grouped_backward(
  tiles: Tiles, kind: str, backend: str, operands: _GroupedOperands, dy_MF: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
  x_MD, w_GDF, group_sizes_G = operands
  x_MD = _quantize_rows(x_MD, kind).dequantize(x_MD.dtype)
  w_GDF = _quantize_matrices(w_GDF, kind).dequantize(w_GDF.dtype)

  def multiply(x_MD: jax.Array, w_GDF: jax.Array) -> jax.Array:
    return GROUPED_MATMUL_BACKENDS[backend].run(x_MD, w_GDF, group_sizes_G, tiles)

  _, vjp = jax.vjp(multiply, x_MD, w_GDF)
  dx_MD, dw_GDF = vjp(dy_MF)
  return dx_MD, dw_GDF, None


quantized_grouped_matmul.defvjp(_grouped_forward, _grouped_backward)
