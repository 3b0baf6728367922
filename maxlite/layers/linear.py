"""Linear layers over one or more axes, with a matmul that stays fast on every backend."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from maxlite.config.schema import LoraConfig
from maxlite.sharding import Sharder

TRANSPOSED = "transposed"  # a kernel in place of `kernel`, features first: see `matmul_few_rows`


def _dot(x: jax.Array, w: jax.Array, contract: tuple[int, int]) -> jax.Array:
  accumulator = np.promote_types(x.dtype, jnp.float32)
  dims = (((contract[0],), (contract[1],)), ((), ()))
  return jax.lax.dot_general(x, w, dims, preferred_element_type=accumulator)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x_TD: jax.Array, w_DF: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
  """y_TF = x w, computed in x's type, accumulated in float32, returned as `out_dtype` (x's type).

  The gradient of w is never rounded to x's type. Gradients are written out because XLA:CPU keeps a
  bfloat16 product in bfloat16 only when the left operand contracts its last axis and the result is
  float32; three times faster there.
  """
  return _dot(x_TD, w_DF.astype(x_TD.dtype), (1, 0)).astype(out_dtype or x_TD.dtype)


def _matmul_forward(x_TD: jax.Array, w_DF: jax.Array, out_dtype: jnp.dtype | None) -> tuple:
  return matmul(x_TD, w_DF, out_dtype), (x_TD, w_DF)


def _matmul_backward(out_dtype: jnp.dtype | None, residuals: tuple, dy_TF: jax.Array) -> tuple:
  del out_dtype
  x_TD, w_DF = residuals
  dy_TF = dy_TF.astype(x_TD.dtype)
  dx_TD = _dot(dy_TF, w_DF.astype(x_TD.dtype), (1, 1)).astype(x_TD.dtype)
  x_DT = x_TD.T
  if x_TD.dtype == jnp.bfloat16 or x_DT.shape[0] > dy_TF.shape[1]:
    # Kept out of the product, into which XLA would fold it: a third faster on a CPU in these cases.
    x_DT = jax.lax.optimization_barrier(x_DT)
  dw_DF = _dot(x_DT, dy_TF, (1, 0)).astype(w_DF.dtype)
  return dx_TD, dw_DF


matmul.defvjp(_matmul_forward, _matmul_backward)


def matmul_few_rows(x_TD: jax.Array, w_FD: jax.Array) -> jax.Array:
  """y_TF = x w^T, with the weights on the left side: for generation, gradients are not its concern.

  XLA:CPU packs all of a product's right operand anew, which for a few rows takes as long as the
  product. Here that is x. The barrier keeps XLA from swapping the two back.
  """
  y_FT = _dot(w_FD.astype(x_TD.dtype), x_TD, (1, 1)).astype(x_TD.dtype)
  return jax.lax.optimization_barrier(y_FT).T


class Linear(nn.Module):
  """A kernel that maps the last axes of x_BT... to new ones.

  `kernel_names` are the logical names of the kernel's axes: first the `num_in` axes of x that are
  contracted, then those of `features`. With a `lora_rank`, what two narrow layers make of x is
  added; the second starts at zero, so nothing changes before it is trained.

  Source: Hu et al., LoRA (2021), section 4.1.
  """

  features: tuple[int, ...]
  kernel_names: tuple[str, ...]
  weight_dtype: jnp.dtype
  sharder: Sharder
  num_in: int = 1
  zero_init: bool = False
  lora: LoraConfig = LoraConfig()
  use_bias: bool = False

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    lead, shape_in = x.shape[: -self.num_in], x.shape[-self.num_in :]
    shape = (*shape_in, *self.features)
    in_axes, out_axes = range(self.num_in), range(self.num_in, len(shape))
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axes, out_axes)
    init = nn.initializers.zeros if self.zero_init else init
    if self.has_variable("params", TRANSPOSED):
      kernel = self.param(TRANSPOSED, init, (*self.features, *shape_in), self.weight_dtype)
      w_FD = kernel.reshape(math.prod(self.features), math.prod(shape_in))
      y = matmul_few_rows(x.reshape(math.prod(lead), -1), w_FD)
      return self._biased(y.reshape(*lead, *self.features))
    init = nn.with_logical_partitioning(init, self.kernel_names)
    kernel = self.param("kernel", init, shape, self.weight_dtype)
    w_DF = kernel.reshape(math.prod(shape_in), math.prod(self.features))
    if self.sharder.num_shards("activation_length") > 1:
      # Rows of [B, T] that are cut along both axes cannot become one axis without moving data.
      y = jax.vmap(matmul, (0, None))(x.reshape(*lead, -1), w_DF)
    else:
      y = matmul(x.reshape(math.prod(lead), -1), w_DF)
    y = self._biased(y.reshape(*lead, *self.features))
    return y + self._adapter(x) if self.lora.lora_rank else y

  def _biased(self, y: jax.Array) -> jax.Array:
    if not self.use_bias:
      return y
    # One whose axis would be that of the residual stream is too small to be cut.
    names = ["norm" if name == "embed" else name for name in self.kernel_names[self.num_in :]]
    init = nn.with_logical_partitioning(nn.initializers.zeros, tuple(names))
    bias = self.param("bias", init, self.features, self.weight_dtype)
    # Added, and so its gradient summed, in float32.
    accumulator = np.promote_types(y.dtype, np.float32)
    bias = bias.astype(accumulator).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    return (y.astype(accumulator) + bias).astype(y.dtype)

  def _adapter(self, x: jax.Array) -> jax.Array:
    rank, kinds = self.lora.lora_rank, (self.weight_dtype, self.sharder)
    names_in, names_out = self.kernel_names[: self.num_in], self.kernel_names[self.num_in :]
    down = Linear((rank,), (*names_in, "lora_rank"), *kinds, num_in=self.num_in, name="lora_a")
    names = ("lora_rank", *names_out)
    up = Linear(self.features, names, *kinds, zero_init=True, name="lora_b")
    return up(down(x)) * jnp.asarray(self.lora.lora_alpha / rank, x.dtype)
