"""The linear layer for decoding on CPUs."""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.kernels.xla_cpu import matmul_few_rows
from maxlite.layers.linear import Linear
from maxlite.layers.lora import LoraLinear

TRANSPOSED = "transposed"  # The parameter that replaces `kernel`.


class TransposedLinear(Linear):
  """A `Linear` for inference whose kernel is stored with its features first.

  XLA:CPU multiplies a few rows faster by a kernel in this layout; see `matmul_few_rows`. The
  product is not quantized and has no gradient.
  """

  def _project(self, x: jax.Array) -> jax.Array:
    lead = x.shape[: -self.num_in]
    contracted = x.shape[-self.num_in :]
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    kernel = self.param(TRANSPOSED, self._kernel_init(), self.features + contracted, weight_dtype)
    w_FD = kernel.reshape(math.prod(self.features), math.prod(contracted))
    y_TF = matmul_few_rows(x.reshape(math.prod(lead), -1), w_FD)
    return y_TF.reshape(lead + self.features)

  def _kernel_init(self) -> nn.initializers.Initializer:
    num_features = len(self.features)
    return nn.initializers.variance_scaling(
      1.0,
      "fan_in",
      "truncated_normal",
      in_axis=range(num_features, num_features + self.num_in),
      out_axis=range(num_features),
    )


class TransposedLoraLinear(LoraLinear):
  """A `LoraLinear` for inference whose kernel, but not its adapter, is stored as above."""

  base_class = TransposedLinear
