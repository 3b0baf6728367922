"""Linear layers whose outputs are multiplied by fixed factors."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.linear import Linear, LinearClass
from maxlite.sharding import Sharder


class ScaledLinear(nn.Module):
  """A layer of the class `linear`, whose output is multiplied by `factor`.

  The parameters of that layer have the path of this module.
  """

  cfg: ModelConfig
  sharder: Sharder
  features: tuple[int, ...]
  kernel_names: tuple[str, ...]
  num_in: int = 1
  use_bias: bool = False
  factor: float = 1.0
  linear: LinearClass = Linear

  def setup(self) -> None:
    self.base = self.linear(
      self.cfg,
      self.sharder,
      features=self.features,
      kernel_names=self.kernel_names,
      num_in=self.num_in,
      use_bias=self.use_bias,
    )
    nn.share_scope(self, self.base)

  def __call__(self, x: jax.Array) -> jax.Array:
    return times(self.base(x), self.factor)


@dataclasses.dataclass(frozen=True)
class ScaledLinears:
  """A `LinearClass` whose layers have the factors of their names; (name, factor) for each."""

  linear: LinearClass
  factors: tuple[tuple[str, float], ...]

  def __call__(
    self,
    cfg: ModelConfig,
    sharder: Sharder,
    features: tuple[int, ...],
    kernel_names: tuple[str, ...],
    num_in: int = 1,
    use_bias: bool = False,
    *,
    name: str,
  ) -> nn.Module:
    fields = (cfg, sharder, features, kernel_names, num_in, use_bias)
    factor = dict(self.factors).get(name, 1.0)
    if factor == 1:
      return self.linear(*fields, name=name)
    return ScaledLinear(*fields, factor, self.linear, name=name)


def times(x: jax.Array, factor: float) -> jax.Array:
  """x times a number, in the type of x."""
  if factor == 1:
    return x
  return x * jnp.asarray(factor, x.dtype)
