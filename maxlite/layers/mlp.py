"""The dense feed-forward block."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import LoraConfig
from maxlite.layers.linear import Linear
from maxlite.sharding import Sharder

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": jax.nn.gelu,  # by tanh
  "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
  "relu": jax.nn.relu,
}


def build_activation(names: tuple[str, ...], limit: float = 0.0) -> Callable[..., jax.Array]:
  """The function of the hidden projections, one for each of `names`, that makes the hidden layer.

  With a `limit`, the activation's input is clamped from above and the linear part on both sides.
  """
  act = ACTIVATIONS[names[0]]
  low, high = (-limit, limit) if limit else (None, None)
  if names[1:]:
    shift = {"linear": 0.0, "linear_plus_one": 1.0}[names[1]]
    return lambda gate, up: act(jnp.clip(gate, max=high)) * (jnp.clip(up, low, high) + shift)
  return lambda h: act(jnp.clip(h, max=high))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def checkpointed_activation(activation: Callable[..., jax.Array], *up: jax.Array) -> jax.Array:
  """activation(*up); its gradient keeps the operands and nothing else."""
  return activation(*up)


def _checkpointed_activation_backward(activation: Callable, up: tuple, dh: jax.Array) -> tuple:
  # Behind the barrier the activation is computed anew, which is cheaper than to write it to memory
  # in the forward pass, as XLA would to share it.
  return jax.vjp(activation, *jax.lax.optimization_barrier(up))[1](dh)


checkpointed_activation.defvjp(
  lambda activation, *up: (activation(*up), up), _checkpointed_activation_backward
)


class MLP(nn.Module):
  """act(x wi_0) * (x wi_1) wo where `activations` is gated, act(x wi_0) wo otherwise.

  Source: Shazeer, GLU Variants Improve Transformer (2020), eq. 5.
  """

  hidden_dim: int
  activations: tuple[str, ...]
  weight_dtype: jnp.dtype
  sharder: Sharder
  limit: float = 0.0  # of the activation's input, see `build_activation`
  lora: LoraConfig = LoraConfig()

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    projected = [self._project(x_BTD, f"wi_{i}") for i in range(len(self.activations))]
    h_BTF = checkpointed_activation(build_activation(self.activations, self.limit), *projected)
    wo = self._linear("wo", x_BTD.shape[-1], ("mlp", "embed"))
    y_BTD = checkpoint_name(wo(h_BTF), "mlpwo")
    names = ("activation_batch", "activation_length", "activation_embed")
    return self.sharder.constrain(y_BTD, names)

  def _project(self, x_BTD: jax.Array, name: str) -> jax.Array:
    wi = self._linear(name, self.hidden_dim, ("embed", "mlp"))
    h_BTF = checkpoint_name(wi(x_BTD), "mlpwi")
    return self.sharder.constrain(
      h_BTF, ("activation_batch", "activation_length", "activation_mlp")
    )

  def _linear(self, name: str, features: int, names: tuple[str, str]) -> Linear:
    return Linear((features,), names, self.weight_dtype, self.sharder, lora=self.lora, name=name)
