"""Linear layers over one or more axes, and their matmul."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype, dot
from maxlite.kernels.quantized import quantized_matmul
from maxlite.kernels.xla_cpu import materialized_transpose, matmul_few_rows
from maxlite.layers.gathered_kernel import multiply_gathered, plan_gather
from maxlite.sharding import Sharder

TRANSPOSED = "transposed"  # replaces `kernel`, with features first; see `matmul_few_rows`


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x_TD: jax.Array, w_DF: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
  """y_TF = x w, computed in x's type, accumulated in float32, returned as `out_dtype` (x's type).

  The gradient of w is never rounded to x's type. Gradients are written out in the form that XLA:CPU
  computes in bfloat16 (kernels/xla_cpu.py).
  """
  return dot(x_TD, w_DF.astype(x_TD.dtype), (1, 0)).astype(out_dtype or x_TD.dtype)


def _matmul_backward(_: jnp.dtype | None, residuals: tuple, dy_TF: jax.Array) -> tuple:
  x_TD, w_DF = residuals
  dy_TF = dy_TF.astype(x_TD.dtype)
  dx_TD = dot(dy_TF, w_DF.astype(x_TD.dtype), (1, 1)).astype(x_TD.dtype)
  # In these cases a third faster on a CPU.
  materialize = x_TD.dtype == jnp.bfloat16 or x_TD.shape[1] > dy_TF.shape[1]
  x_DT = materialized_transpose(x_TD) if materialize else x_TD.T
  dw_DF = dot(x_DT, dy_TF, (1, 0)).astype(w_DF.dtype)
  return dx_TD, dw_DF


matmul.defvjp(lambda x, w, out_dtype: (matmul(x, w, out_dtype), (x, w)), _matmul_backward)


def multiply(
  x: jax.Array, kernel: jax.Array, num_in: int, out_dtype: jnp.dtype | None = None, kind: str = ""
) -> jax.Array:
  """`matmul` of the last `num_in` axes of x with the first of the kernel, quantized to `kind`."""
  lead, shape_in = x.shape[: x.ndim - num_in], x.shape[x.ndim - num_in :]
  operands = x.reshape(math.prod(lead), -1), kernel.reshape(math.prod(shape_in), -1), out_dtype
  y = quantized_matmul(matmul, *operands, kind) if kind else matmul(*operands)
  return y.reshape(*lead, *kernel.shape[num_in:])


class Linear(nn.Module):
  """Maps the last `num_in` axes of x to `features`.

  `kernel_names` are the logical axes of the kernel: those of x that are contracted, then those of
  `features`. With cfg.lora, a low-rank product is added; its second factor is initialised to zero,
  so the module computes the same until it is trained.

  Source: Hu et al., LoRA (2021), section 4.1.
  """

  cfg: ModelConfig
  sharder: Sharder
  features: tuple[int, ...]
  kernel_names: tuple[str, ...]
  num_in: int = 1
  use_bias: bool = False
  zero_init: bool = False
  has_adapter: bool = True  # if cfg.lora is enabled

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    dtype = jnp.dtype(self.cfg.weight_dtype)
    lead, shape_in = x.shape[: -self.num_in], x.shape[-self.num_in :]
    shape = (*shape_in, *self.features)
    in_axes, out_axes = range(self.num_in), range(self.num_in, len(shape))
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axes, out_axes)
    init = nn.initializers.zeros if self.zero_init else init
    if self.has_variable("params", TRANSPOSED):
      kernel = self.param(TRANSPOSED, init, (*self.features, *shape_in), dtype)
      w_FD = kernel.reshape(math.prod(self.features), math.prod(shape_in))
      y = matmul_few_rows(x.reshape(math.prod(lead), -1), w_FD)
      return self._biased(y.reshape(*lead, *self.features))
    init = nn.with_logical_partitioning(init, self.kernel_names)
    kernel = self.param("kernel", init, shape, dtype)
    kind = "" if "lora_rank" in self.kernel_names else self.cfg.quantization
    product = functools.partial(multiply, kind=kind)
    if plan := plan_gather(self.sharder, self.kernel_names, self.num_in, shape, lead):
      y = multiply_gathered(plan, product, x, kernel)
    elif self.sharder.num_shards("activation_length") > 1:
      # If both B and T are sharded, merging them would move data.
      y = jax.vmap(functools.partial(product, num_in=self.num_in), (0, None))(x, kernel)
    else:
      y = product(x, kernel, self.num_in)
    y = self._biased(y.reshape(*lead, *self.features))
    return y + self._adapter(x) if self.has_adapter and self.cfg.lora.lora_rank else y

  def _biased(self, y: jax.Array) -> jax.Array:
    if not self.use_bias:
      return y
    # The bias of the residual stream's axis is too small to be sharded.
    names = ["norm" if name == "embed" else name for name in self.kernel_names[self.num_in :]]
    init = nn.with_logical_partitioning(nn.initializers.zeros, tuple(names))
    bias = self.param("bias", init, self.features, jnp.dtype(self.cfg.weight_dtype))
    # Added in float32, so that its gradient is summed in float32.
    dtype = accumulator_dtype(y.dtype)
    bias = bias.astype(dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    return (y.astype(dtype) + bias).astype(y.dtype)

  def _adapter(self, x: jax.Array) -> jax.Array:
    lora, num_in = self.cfg.lora, self.num_in
    names_in, names_out = self.kernel_names[:num_in], self.kernel_names[num_in:]
    linear = functools.partial(Linear, self.cfg, self.sharder, has_adapter=False)
    down = linear((lora.lora_rank,), (*names_in, "lora_rank"), num_in=num_in, name="lora_a")
    up = linear(self.features, ("lora_rank", *names_out), zero_init=True, name="lora_b")
    return up(down(x)) * jnp.asarray(lora.lora_alpha / lora.lora_rank, x.dtype)
