"""Attention and a state-space layer of one input, and MLPs, with factors of their projections."""

import jax
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.attention import Attention
from maxlite.layers.keys_values import KeysValues
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import AttentionBesideMambaSpec, ScaledMlpSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.mamba import Mamba
from maxlite.layers.mlp import MLP
from maxlite.layers.scaled_linear import ScaledLinears, times
from maxlite.sharding import Sharder

# The projections of a state-space layer, in the order of `ssm_multipliers`.
_PROJECTIONS = ("gate", "value", "key", "query", "step")


class AttentionBesideMamba(nn.Module):
  """The sum of the outputs of attention and of a state-space layer, both of x_BTD.

  Returns (y_BTD, the keys and values of attention). The parameters have the path of the layer.

  Source: Falcon-H1 (2025), sections 2.1 and 3.2.2.
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: AttentionBesideMambaSpec
  linear: LinearClass = Linear

  def setup(self) -> None:
    factors = self.cfg.multipliers
    self.attention = Attention(
      self.cfg,
      self.sharder,
      self.spec.attention,
      ScaledLinears(self.linear, (("key", factors.key_multiplier),)),
    )
    of_mamba = tuple(zip(_PROJECTIONS, factors.ssm_multipliers, strict=True))
    self.mamba = Mamba(
      self.cfg, self.sharder, self.spec.mamba, ScaledLinears(self.linear, of_mamba)
    )

  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[jax.Array, KeysValues]:
    factors = self.cfg.multipliers
    attended_BTD, keys_values = self.attention(
      times(x_BTD, factors.attention_in_multiplier), inputs
    )
    recurrent_BTD, _ = self.mamba(times(x_BTD, factors.ssm_in_multiplier), inputs)
    y_BTD = times(attended_BTD, factors.attention_out_multiplier)
    return y_BTD + times(recurrent_BTD, factors.ssm_out_multiplier), keys_values


class ScaledMlp(nn.Module):
  """An `MLP` whose gate and output are multiplied by cfg.multipliers.mlp_multipliers."""

  cfg: ModelConfig
  sharder: Sharder
  spec: ScaledMlpSpec
  linear: LinearClass = Linear

  def setup(self) -> None:
    gate, out = self.cfg.multipliers.mlp_multipliers
    linear = ScaledLinears(self.linear, (("wi_0", gate), ("wo", out)))
    self.mlp = MLP(self.cfg, self.sharder, self.spec, linear)
    nn.share_scope(self, self.mlp)

  def __call__(self, x_BTD: jax.Array, *_: jax.Array) -> jax.Array:
    return self.mlp(x_BTD)
