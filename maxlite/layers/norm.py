"""RMSNorm."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.partitioned import Init, partitioned


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last axis, computed in float32, returned in x's type.

  With `zero_centred`, the parameter is scale - 1, so that weight decay pulls the scale towards 1.

  Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019), eq. 4.
  """

  epsilon: float
  weight_dtype: jnp.dtype
  zero_centred: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    init: Init = nn.initializers.ones
    if self.zero_centred:
      init = nn.initializers.zeros
    init = partitioned(init, ("norm",))
    scale_D = self.param("scale", init, x.shape[-1:], self.weight_dtype)
    dtype = accumulator_dtype(x.dtype)
    x32 = x.astype(dtype)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    inverse_rms = jax.lax.rsqrt(mean_square + self.epsilon)
    lead = (1,) * (x.ndim - 1)
    scale = scale_D.astype(dtype).reshape((*lead, -1))
    if self.zero_centred:
      scale = 1 + scale
    y = x32 * inverse_rms * scale
    return y.astype(x.dtype)
