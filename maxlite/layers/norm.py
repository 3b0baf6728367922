"""RMSNorm and LayerNorm."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.partitioned import Init, partitioned


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last axis, computed in float32, returned in x's type.

  With `zero_centred`, the parameter is scale - 1, so that weight decay pulls the scale towards 1.
  Without `has_scale`, there is no parameter, and the scale is 1.

  Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019), eq. 4.
  """

  epsilon: float
  weight_dtype: jnp.dtype
  zero_centred: bool = False
  has_scale: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    dtype = accumulator_dtype(x.dtype)
    x32 = x.astype(dtype)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    inverse_rms = jax.lax.rsqrt(mean_square + self.epsilon)
    y = x32 * inverse_rms
    if self.has_scale:
      y = y * self._scale(x.shape[-1:], dtype, x.ndim)
    return y.astype(x.dtype)

  def _scale(self, shape: tuple[int, ...], dtype: jnp.dtype, num_axes: int) -> jax.Array:
    """The scale of each channel, for an array of `num_axes` axes."""
    init: Init = nn.initializers.ones
    if self.zero_centred:
      init = nn.initializers.zeros
    init = partitioned(init, ("norm",))
    scale_D = self.param("scale", init, shape, self.weight_dtype)
    lead = (1,) * (num_axes - 1)
    scale = scale_D.astype(dtype).reshape((*lead, -1))
    if self.zero_centred:
      scale = 1 + scale
    return scale


class LayerNorm(nn.Module):
  """(x - mean(x)) / std(x) * scale + bias over the last axis, in float32, returned in x's type.

  The variance is that of all channels, without Bessel's correction. `names` are the logical axes of
  the parameters: those of the last axes of x.

  Source: Ba et al., Layer Normalization (2016), section 3.
  """

  epsilon: float
  weight_dtype: jnp.dtype
  has_bias: bool = True
  names: tuple[str, ...] = ("norm",)

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    dtype = accumulator_dtype(x.dtype)
    x32 = x.astype(dtype)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + self.epsilon)
    y = y * self._channels("scale", nn.initializers.ones, x.shape).astype(dtype)
    if self.has_bias:
      y = y + self._channels("bias", nn.initializers.zeros, x.shape).astype(dtype)
    return y.astype(x.dtype)

  def _channels(self, name: str, init: Init, shape: tuple[int, ...]) -> jax.Array:
    """A parameter with the axes `names`, for an array of this shape."""
    num_axes = len(self.names)
    last = shape[-num_axes:]
    value = self.param(name, partitioned(init, self.names), last, self.weight_dtype)
    return value.reshape((*(1,) * (len(shape) - num_axes), *last))


def build_norm(
  cfg: ModelConfig,
  name: str | None = None,
  *,
  has_scale: bool = True,
  names: tuple[str, ...] = ("norm",),
) -> nn.Module:
  """The norm of the family of `cfg`.

  Args:
    names: the logical axes of its parameters; several for a LayerNorm only.
  """
  family = cfg.family
  weight_dtype = jnp.dtype(cfg.weight_dtype)
  if family.norm == "layer":
    assert has_scale, name
    return LayerNorm(
      cfg.normalization_layer_epsilon, weight_dtype, family.norm_bias, names, name=name
    )
  assert names == ("norm",), name
  return RMSNorm(
    cfg.normalization_layer_epsilon,
    weight_dtype,
    family.zero_centred_norms,
    has_scale,
    name=name,
  )
