"""The dense feed-forward block."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.layers.linear import Linear
from maxlite.parallel import Sharder

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu}


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
    h_BTF = ACTIVATIONS[self.activations[0]](self._project(x_BTD, "wi_0"))
    if self.activations[1:]:
      h_BTF *= self._project(x_BTD, "wi_1")
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
