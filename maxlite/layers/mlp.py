"""The dense feed-forward block."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ModelConfig
from maxlite.layers.linear import Linear
from maxlite.sharding import ROWS, Sharder

ACTIVATIONS = {
  "silu": jax.nn.silu,
  "gelu": jax.nn.gelu,  # the tanh approximation
  "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
  "relu": jax.nn.relu,
}


def build_activation(names: tuple[str, ...], limit: float = 0.0) -> Callable[..., jax.Array]:
  """The function of the input projections, one for each of `names`, that gives the hidden layer.

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
  """activation(*up); the backward pass saves only the operands and recomputes the result."""
  return activation(*up)


def _backward(activation: Callable, up: tuple, dh: jax.Array) -> tuple:
  # The barrier makes XLA recompute the activation, which is cheaper than writing it to memory in
  # the forward pass; without it, XLA would reuse that of the forward pass.
  return jax.vjp(activation, *jax.lax.optimization_barrier(up))[1](dh)


checkpointed_activation.defvjp(lambda activation, *up: (activation(*up), up), _backward)


class MLP(nn.Module):
  """act(x wi_0) * (x wi_1) wo if the activations are gated, else act(x wi_0) wo.

  Source: Shazeer, GLU Variants Improve Transformer (2020), eq. 5.
  """

  cfg: ModelConfig
  sharder: Sharder
  hidden_dim: int
  limit: float = 0.0  # of the activation's input, see `build_activation`

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    names = self.cfg.mlp_activations
    linear = functools.partial(Linear, self.cfg, self.sharder)
    up = []
    for i in range(len(names)):
      wi = linear((self.hidden_dim,), ("embed", "mlp"), name=f"wi_{i}")
      up.append(
        self.sharder.constrain(checkpoint_name(wi(x_BTD), "mlpwi"), (*ROWS, "activation_mlp"))
      )
    h_BTF = checkpointed_activation(build_activation(names, self.limit), *up)
    y_BTD = linear(x_BTD.shape[-1:], ("mlp", "embed"), name="wo")(h_BTF)
    return self.sharder.constrain(checkpoint_name(y_BTD, "mlpwo"), (*ROWS, "activation_embed"))
