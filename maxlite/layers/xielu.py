"""xIELU: an activation whose curvature on both sides of zero is trained.

Source: Huang and Schlag, Deriving Activation Functions Using Integration (2024), section 4; with
the constants of Hernández-Cano et al., Apertus (2025), section 2.1.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.partitioned import partitioned

SLOPE = 0.5  # at zero
BOUND = -1e-6  # the exponential of numbers from here on is that of this number
_INITIAL = math.log(math.expm1(0.8))
_INITIAL_NEGATIVE = math.log(math.expm1(0.8 - SLOPE))


class XieluScales(NamedTuple):
  """The trained numbers of shape [1], of which softplus is a curvature; the second above SLOPE."""

  positive: jax.Array
  negative: jax.Array


def xielu(x: jax.Array, positive: jax.Array, negative: jax.Array) -> jax.Array:
  """xIELU of each element, computed in float32, returned in x's type."""
  dtype = accumulator_dtype(x.dtype)
  x32 = x.astype(dtype)
  shape = (1,) * x.ndim
  rising = jax.nn.softplus(positive.astype(dtype)).reshape(shape)
  falling = SLOPE + jax.nn.softplus(negative.astype(dtype)).reshape(shape)
  above = rising * jnp.square(x32)
  below = falling * (jnp.expm1(jnp.minimum(x32, BOUND)) - x32)
  return (jnp.where(x32 > 0, above, below) + SLOPE * x32).astype(x.dtype)


class XieluParameters(nn.Module):
  """The numbers of one MLP."""

  weight_dtype: jnp.dtype

  @nn.compact
  def __call__(self) -> XieluScales:
    initial = {"positive_scale": _INITIAL, "negative_scale": _INITIAL_NEGATIVE}
    numbers = []
    for name, value in initial.items():
      init = partitioned(nn.initializers.constant(value), ("norm",))
      numbers.append(self.param(name, init, (1,), self.weight_dtype))
    return XieluScales(*numbers)
