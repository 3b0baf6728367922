"""A mixture of experts beside an MLP."""

import jax
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.layer_specs import MoeBesideMlpSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.moe_block import MoeBlock
from maxlite.layers.moe.router import RouterSums
from maxlite.layers.norm import build_norm
from maxlite.sharding import Sharder


class MoeBesideMlp(nn.Module):
  """The sum of the outputs of a mixture and of an MLP, each after a norm of its own.

  Returns (y_BTD, RouterSums). The mixture gets x_BTD, the MLP another norm of residual_BTD. The
  parameters have the path of the layer.

  Source: the code published with Gemma 4 (2026).
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: MoeBesideMlpSpec
  linear: LinearClass = Linear

  def setup(self) -> None:
    self.moe = MoeBlock(self.cfg, self.sharder, self.spec.moe, self.linear)
    self.moe_branch_norm = build_norm(self.cfg)
    self.mlp_norm = build_norm(self.cfg)
    self.mlp = MLP(self.cfg, self.sharder, self.spec.mlp, self.linear)
    self.mlp_branch_norm = build_norm(self.cfg)

  def __call__(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    residual_BTD: jax.Array,
  ) -> tuple[jax.Array, RouterSums]:
    y_BTD, sums = self.moe(x_BTD, segment_BT, residual_BTD)
    dense_BTD = self.mlp_branch_norm(self.mlp(self.mlp_norm(residual_BTD)))
    return dense_BTD + self.moe_branch_norm(y_BTD), sums
