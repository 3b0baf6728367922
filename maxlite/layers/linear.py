"""Linear layers over one or more axes, and their matmul."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype, dot
from maxlite.kernels.quantized import quantized_matmul
from maxlite.kernels.xla_cpu import materialized_transpose
from maxlite.layers.gathered_kernel import multiply_gathered, plan_gather
from maxlite.layers.partitioned import partitioned
from maxlite.sharding import Sharder


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x_TD: jax.Array, w_DF: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
  """y_TF = x w, computed in x's type, accumulated in float32, returned as `out_dtype` (x's type).

  The gradient of w is never rounded to x's type. Gradients are written out in the form that XLA:CPU
  computes in bfloat16 (kernels/xla_cpu.py).
  """
  y_TF = dot(x_TD, w_DF.astype(x_TD.dtype), (1, 0))
  return y_TF.astype(out_dtype or x_TD.dtype)


def _matmul_forward(
  x_TD: jax.Array,
  w_DF: jax.Array,
  out_dtype: jnp.dtype | None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
  return matmul(x_TD, w_DF, out_dtype), (x_TD, w_DF)


def _matmul_backward(
  _: jnp.dtype | None,
  residuals: tuple[jax.Array, jax.Array],
  dy_TF: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  x_TD, w_DF = residuals
  dtype = x_TD.dtype
  dy_TF = dy_TF.astype(dtype)
  dx_TD = dot(dy_TF, w_DF.astype(dtype), (1, 1)).astype(dtype)
  # In these cases, a materialized transpose is a third faster on a CPU.
  if dtype == jnp.bfloat16 or x_TD.shape[1] > dy_TF.shape[1]:
    x_DT = materialized_transpose(x_TD)
  else:
    x_DT = x_TD.T
  dw_DF = dot(x_DT, dy_TF, (1, 0)).astype(w_DF.dtype)
  return dx_TD, dw_DF


matmul.defvjp(_matmul_forward, _matmul_backward)


def multiply(
  x: jax.Array,
  kernel: jax.Array,
  num_in: int,
  out_dtype: jnp.dtype | None = None,
  quantization: str = "",
) -> jax.Array:
  """`matmul` of the last `num_in` axes of x with the first axes of the kernel.

  Args:
    out_dtype: type of the result; None: x's type.
    quantization: type that the operands are rounded to (kernels/quantized.py); empty: none.
  """
  num_lead = x.ndim - num_in
  lead = x.shape[:num_lead]
  contracted = x.shape[num_lead:]
  x_TD = x.reshape(math.prod(lead), -1)
  w_DF = kernel.reshape(math.prod(contracted), -1)
  if quantization:
    y_TF = quantized_matmul(matmul, x_TD, w_DF, out_dtype, quantization)
  else:
    y_TF = matmul(x_TD, w_DF, out_dtype)
  return y_TF.reshape(lead + kernel.shape[num_in:])


class Linear(nn.Module):
  """Maps the last `num_in` axes of x to `features`, with an optional bias.

  `kernel_names` are the logical axes of the kernel: those of x that are contracted, then those of
  `features`. With `is_quantized`, the product is rounded by cfg.quantization.
  """

  cfg: ModelConfig
  sharder: Sharder
  features: tuple[int, ...]
  kernel_names: tuple[str, ...]
  num_in: int = 1
  use_bias: bool = False
  zero_init: bool = False
  is_quantized: bool = True

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    y = self._project(x)
    if self.use_bias:
      y = self._add_bias(y)
    return y

  def _project(self, x: jax.Array) -> jax.Array:
    """The product of x and the kernel, on the shards of the mesh."""
    lead = x.shape[: -self.num_in]
    contracted = x.shape[-self.num_in :]
    shape = contracted + self.features
    init = partitioned(self._kernel_init(), self.kernel_names)
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    kernel = self.param("kernel", init, shape, weight_dtype)
    quantization = self.cfg.quantization if self.is_quantized else ""
    product = functools.partial(multiply, quantization=quantization)
    plan = plan_gather(self.sharder, self.kernel_names, self.num_in, shape, lead)
    if plan is not None:
      return multiply_gathered(plan, product, x, kernel)
    if self.sharder.num_shards("activation_length") > 1:
      # If both B and T are sharded, merging them would move data.
      product_of_row = functools.partial(product, num_in=self.num_in)
      return jax.vmap(product_of_row, in_axes=(0, None))(x, kernel)
    return product(x, kernel, self.num_in)

  def _kernel_init(self) -> nn.initializers.Initializer:
    """Zeros, or random values that preserve the variance of x."""
    if self.zero_init:
      return nn.initializers.zeros
    num_axes = self.num_in + len(self.features)
    return nn.initializers.variance_scaling(
      1.0,
      "fan_in",
      "truncated_normal",
      in_axis=range(self.num_in),
      out_axis=range(self.num_in, num_axes),
    )

  def _add_bias(self, y: jax.Array) -> jax.Array:
    """y plus the bias, added in float32 so that the bias's gradient is summed in float32."""
    names = []
    for name in self.kernel_names[self.num_in :]:
      # The bias of the residual stream's axis is too small to be sharded.
      names.append("norm" if name == "embed" else name)
    init = partitioned(nn.initializers.zeros, tuple(names))
    weight_dtype = jnp.dtype(self.cfg.weight_dtype)
    bias = self.param("bias", init, self.features, weight_dtype)
    dtype = accumulator_dtype(y.dtype)
    lead = (1,) * (y.ndim - bias.ndim)
    bias = bias.astype(dtype).reshape(lead + bias.shape)
    biased = y.astype(dtype) + bias
    return biased.astype(y.dtype)


# `Linear`, or a class that is constructed as it is: see lora.py and transposed_linear.py.
LinearClass = Callable[..., nn.Module]
