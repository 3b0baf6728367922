"""The feed-forward networks as grouped matmuls of any backend."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.grouped_matmul.api import grouped_matmul
from maxlite.kernels.grouped_matmul.tiles import Tiles
from maxlite.kernels.grouped_mlp.biases import Adapter, Adapters, Biases
from maxlite.kernels.numerics import accumulator_dtype

# Elementwise: the operands of the activation, each [..., F], to the hidden rows [..., F].
Activation = Callable[..., jax.Array]


def grouped_mlp(
  x_MD: jax.Array,
  weight_M: jax.Array,
  wi_GDF: Sequence[jax.Array],
  wo_GFD: jax.Array,
  biases: Biases | None,
  adapters: Adapters | None,
  group_sizes_G: jax.Array,
  *,
  activation: Activation,
  backend: str,
  wi_tiles: Tiles,
  wo_tiles: Tiles,
  quantization: str,
) -> jax.Array:
  """y_MD in x's type. Biases and adapters are not quantized."""
  multiply = functools.partial(grouped_matmul, backend=backend)
  multiply_wi = functools.partial(multiply, tiles=wi_tiles, quantization=quantization)
  multiply_wo = functools.partial(multiply, tiles=wo_tiles, quantization=quantization)
  # As one product, so that x is read once and has one gradient.
  up_MF = multiply_wi(x_MD, jnp.concatenate(wi_GDF, axis=2), group_sizes_G)
  if biases is not None:
    # As grouped products with a column of ones, which exclude rows past the groups in both passes.
    ones_M1 = jnp.ones_like(x_MD[:, :1])
    bi_G1F = jnp.concatenate(biases.bi_GF, axis=1)[:, None]
    up_MF += multiply(ones_M1, bi_G1F, group_sizes_G)
  if adapters is not None:
    changes = [_change(x_MD, adapter, group_sizes_G, multiply) for adapter in adapters.wi]
    up_MF += jnp.concatenate(changes, axis=1)
  up_MF = checkpoint_name(up_MF, "mlpwi")
  y_MD = _down(up_MF, weight_M, wo_GFD, group_sizes_G, activation, multiply_wo)
  if biases is not None:
    weight_M1 = weight_M.astype(x_MD.dtype)[:, None]
    y_MD += multiply(weight_M1, biases.bo_GD[:, None], group_sizes_G)
  if adapters is not None:
    h_MF = _hidden(activation, wo_GFD.shape[1], up_MF, weight_M)
    y_MD += _change(h_MF, adapters.wo, group_sizes_G, multiply)
  return y_MD


def _change(
  x_MD: jax.Array,
  adapter: Adapter,
  group_sizes_G: jax.Array,
  multiply: Callable[..., jax.Array],
) -> jax.Array:
  """The product of the rows and an adapter, by its factors: [M, R] rows are between them."""
  return multiply(multiply(x_MD, adapter.a_GDR, group_sizes_G), adapter.b_GRF, group_sizes_G)


class _DownOperands(NamedTuple):
  """What the backward pass of the output projection reads."""

  up_MF: jax.Array
  weight_M: jax.Array
  wo_GFD: jax.Array
  group_sizes_G: jax.Array


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _down(
  up_MF: jax.Array,
  weight_M: jax.Array,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
  activation: Activation,
  multiply: Callable[..., jax.Array],
) -> jax.Array:
  """y_MD; the gradient saves the operands, and recomputes the weighted hidden rows."""
  h_MF = _hidden(activation, wo_GFD.shape[1], up_MF, weight_M)
  return multiply(h_MF, wo_GFD, group_sizes_G)


def _hidden(activation: Activation, width: int, up_MF: jax.Array, weight_M: jax.Array) -> jax.Array:
  """h_MF of the activation's operands, concatenated in up_MF, each of `width` columns."""
  operands = jnp.split(up_MF, up_MF.shape[1] // width, axis=1)
  return weighted(activation, operands, weight_M)


def weighted(activation: Activation, up_MF: Sequence[jax.Array], weight_M: jax.Array) -> jax.Array:
  """h_MF: the hidden rows, each multiplied by its weight in float32."""
  h_MF = activation(*up_MF)
  dtype = accumulator_dtype(h_MF.dtype)
  weight_M1 = weight_M.astype(dtype)[:, None]
  return (h_MF.astype(dtype) * weight_M1).astype(h_MF.dtype)


def _down_forward(
  up_MF: jax.Array,
  weight_M: jax.Array,
  wo_GFD: jax.Array,
  group_sizes_G: jax.Array,
  activation: Activation,
  multiply: Callable[..., jax.Array],
) -> tuple[jax.Array, _DownOperands]:
  y_MD = _down(up_MF, weight_M, wo_GFD, group_sizes_G, activation, multiply)
  return y_MD, _DownOperands(up_MF, weight_M, wo_GFD, group_sizes_G)


def _down_backward(
  activation: Activation,
  multiply: Callable[..., jax.Array],
  operands: _DownOperands,
  dy_MD: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, None]:
  # The barrier makes XLA recompute the hidden rows, which is cheaper than saving them; without it,
  # XLA would reuse those of the forward pass.
  up_MF, weight_M, wo_GFD, group_sizes_G = jax.lax.optimization_barrier(operands)
  hidden = functools.partial(_hidden, activation, wo_GFD.shape[1])
  h_MF, hidden_vjp = jax.vjp(hidden, up_MF, weight_M)
  product = functools.partial(multiply, group_sizes_G=group_sizes_G)
  _, product_vjp = jax.vjp(product, h_MF, wo_GFD)
  dh_MF, dwo_GFD = product_vjp(dy_MD)
  dup_MF, dweight_M = hidden_vjp(dh_MF)
  return dup_MF, dweight_M, dwo_GFD, None


_down.defvjp(_down_forward, _down_backward)
