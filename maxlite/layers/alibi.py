"""ALiBi: a bias of attention scores that falls linearly with the distance of a key.

A softmax does not change if a number is added to all scores of a query. So the bias of a key is its
position times the slope of the head, whatever the query's position, and is one more channel of
keys, by which queries have a 1. Every backend of attention, the cache and the context axis treat it
as they do other channels.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


def alibi_slopes(num_heads: int) -> np.ndarray:
  """slope_H: for a power of two the powers of 2^(-8 / H), else those of the power below it first.

  The other heads have every second slope of twice as many.

  Source: Press et al., Train Short, Test Long (2022), section 3, and the code published with it.
  """
  power = 2 ** math.floor(math.log2(num_heads))
  slopes = _powers(power)
  if power < num_heads:
    others = _powers(2 * power)[::2]
    slopes = np.concatenate([slopes, others[: num_heads - power]])
  return slopes


def _powers(num_heads: int) -> np.ndarray:
  """The slopes of a power of two of heads."""
  return 2.0 ** (-8 / num_heads * np.arange(1, num_heads + 1))


def key_bias(position_BT: jax.Array, num_heads: int) -> jax.Array:
  """bias_BTH, float32: of the key at each position, with numbers of bfloat16.

  Positions, slopes and products are rounded to bfloat16, as in the code published with Falcon-RW
  (2023).
  """
  slope_H = _rounded(jnp.asarray(alibi_slopes(num_heads), jnp.float32))
  position_BT1 = _rounded(position_BT.astype(jnp.float32))[..., None]
  return _rounded(position_BT1 * slope_H[None, None])


def _rounded(x: jax.Array) -> jax.Array:
  """`x` with numbers of bfloat16; XLA may skip a conversion to that type and back."""
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def with_bias(x_BTHC: jax.Array, bias_BTH: jax.Array | float, num_channels: int) -> jax.Array:
  """x_BTHC with more channels, of which the first is the bias and others are 0."""
  more_BTHC = jnp.zeros((*x_BTHC.shape[:-1], num_channels), x_BTHC.dtype)
  more_BTHC = more_BTHC.at[..., 0].set(jnp.asarray(bias_BTH, x_BTHC.dtype))
  return jnp.concatenate([x_BTHC, more_BTHC], axis=-1)
