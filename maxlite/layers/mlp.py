"""The dense feed-forward block."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import ModelConfig
from maxlite.layers.layer_specs import MlpSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.xielu import XieluParameters, xielu
from maxlite.sharding import ROWS, Sharder

Activation = Callable[..., jax.Array]  # Maps arrays of one shape to one array of that shape.


def _quick_gelu(x: jax.Array) -> jax.Array:
  return x * jax.nn.sigmoid(1.702 * x)


def _squared_relu(x: jax.Array) -> jax.Array:
  return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Activation] = {
  "silu": jax.nn.silu,
  "gelu": jax.nn.gelu,  # The tanh approximation.
  "exact_gelu": functools.partial(jax.nn.gelu, approximate=False),
  "quick_gelu": _quick_gelu,
  "relu": jax.nn.relu,
  "squared_relu": _squared_relu,
  "xielu": xielu,  # of its parameters too
}
# The modules that return the parameters of activations that have some.
_PARAMETERS = {"xielu": XieluParameters}
# By the name of the second activation: what is added to the linear part of a gated MLP.
_SHIFTS = {"linear": 0.0, "linear_plus_one": 1.0}


def build_activation(names: tuple[str, ...], limit: float = 0.0) -> Activation:
  """The function of the input projections, one for each of `names`, that gives the hidden layer.

  Parameters of the activation follow the projections.
  With a `limit`, the activation's input is clamped from above and the linear part on both sides.
  """
  activate = ACTIVATIONS[names[0]]
  low = None
  high = None
  if limit:
    low = -limit
    high = limit

  def ungated(h: jax.Array, *parameters: jax.Array) -> jax.Array:
    return activate(jnp.clip(h, max=high), *parameters)

  if len(names) == 1:
    return ungated
  shift = _SHIFTS[names[1]]

  def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return activate(jnp.clip(gate, max=high)) * (jnp.clip(up, low, high) + shift)

  return gated


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def checkpointed_activation(
  activation: Activation,
  barrier: bool,
  up: tuple[jax.Array, ...],
) -> jax.Array:
  """activation(*up); the backward pass saves only the operands and recomputes the result.

  The barrier makes XLA recompute it, which is cheaper than writing it to memory in the forward
  pass; without it, XLA would reuse that of the forward pass. It is not needed in a rematerialized
  layer. There XLA:GPU computes result and gradients together if no barrier is between them.
  """
  return _activate(activation, up)


def _activate(activation: Activation, up: tuple[jax.Array, ...]) -> jax.Array:
  return activation(*up)


def _activation_forward(
  activation: Activation,
  barrier: bool,
  up: tuple[jax.Array, ...],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  return _activate(activation, up), up


def _activation_backward(
  activation: Activation,
  barrier: bool,
  up: tuple[jax.Array, ...],
  dh: jax.Array,
) -> tuple[tuple[jax.Array, ...]]:
  if barrier:
    up = jax.lax.optimization_barrier(up)
  _, pull_back = jax.vjp(functools.partial(_activate, activation), up)
  return pull_back(dh)


checkpointed_activation.defvjp(_activation_forward, _activation_backward)


class MLP(nn.Module):
  """act(x wi_0) * (x wi_1) wo if the activations are gated, else act(x wi_0) wo.

  `limit` of the spec bounds the activation's input, see `build_activation`. With its `has_bias`,
  every projection has a bias.

  Source: Shazeer, GLU Variants Improve Transformer (2020), eq. 5.
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: MlpSpec
  linear: LinearClass = Linear

  @nn.compact
  def __call__(self, x_BTD: jax.Array, *_: jax.Array) -> jax.Array:
    activations = self.cfg.mlp_activations
    up = []
    for i in range(len(activations)):
      wi = self.linear(
        self.cfg,
        self.sharder,
        features=(self.spec.hidden_dim,),
        kernel_names=("embed", "mlp"),
        use_bias=self.spec.has_bias,
        name=f"wi_{i}",
      )
      up_BTF = checkpoint_name(wi(x_BTD), "mlpwi")
      up.append(self.sharder.constrain(up_BTF, (*ROWS, "activation_mlp")))
    parameters = _PARAMETERS.get(activations[0])
    if parameters is not None:
      module = parameters(jnp.dtype(self.cfg.weight_dtype), name=activations[0])
      up.extend(module())
    activation = build_activation(activations, self.spec.limit)
    barrier = self.sharder.platform != "gpu" or self.cfg.remat_policy == "none"
    h_BTF = checkpointed_activation(activation, barrier, tuple(up))
    wo = self.linear(
      self.cfg,
      self.sharder,
      features=x_BTD.shape[-1:],
      kernel_names=("mlp", "embed"),
      use_bias=self.spec.has_bias,
      name="wo",
    )
    y_BTD = checkpoint_name(wo(h_BTF), "mlpwo")
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed"))
