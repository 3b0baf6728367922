"""The dense feed-forward block."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.layers.linear import Linear
from maxlite.parallel import Sharder

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(gate: jax.Array, up: jax.Array, activation: str) -> jax.Array:
  """act(gate) * up; its gradient keeps the two operands and nothing else."""
  return ACTIVATIONS[activation](gate) * up


def _gated_forward(gate: jax.Array, up: jax.Array, activation: str) -> tuple:
  return gated(gate, up, activation), (gate, up)


def _gated_backward(activation: str, residuals: tuple, dy: jax.Array) -> tuple:
  # Behind the barrier the activation is computed anew, which is cheaper than to write it to memory
  # in the forward pass, as XLA would to share it.
  gate, up = jax.lax.optimization_barrier(residuals)
  return jax.vjp(lambda gate, up: ACTIVATIONS[activation](gate) * up, gate, up)[1](dy)


gated.defvjp(_gated_forward, _gated_backward)


class MLP(nn.Module):
  """act(x wi_0) * (x wi_1) wo where `activations` is gated, act(x wi_0) wo otherwise.

  Source: Shazeer, GLU Variants Improve Transformer (2020), eq. 5.
  """

  hidden_dim: int
  activations: tuple[str, ...]
  weight_dtype: jnp.dtype
  sharder: Sharder

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    activation = self.activations[0]
    if self.activations[1:]:
      h_BTF = gated(self._project(x_BTD, "wi_0"), self._project(x_BTD, "wi_1"), activation)
    else:
      h_BTF = ACTIVATIONS[activation](self._project(x_BTD, "wi_0"))
    wo = Linear(x_BTD.shape[-1:], ("mlp", "embed"), self.weight_dtype, self.sharder, name="wo")
    y_BTD = checkpoint_name(wo(h_BTF), "mlpwo")
    names = ("activation_batch", "activation_length", "activation_embed")
    return self.sharder.constrain(y_BTD, names)

  def _project(self, x_BTD: jax.Array, name: str) -> jax.Array:
    wi = Linear((self.hidden_dim,), ("embed", "mlp"), self.weight_dtype, self.sharder, name=name)
    h_BTF = checkpoint_name(wi(x_BTD), "mlpwi")
    return self.sharder.constrain(
      h_BTF, ("activation_batch", "activation_length", "activation_mlp")
    )
