"""The mixture-of-experts block."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.experts import Experts
from maxlite.layers.moe.router import Router, RouterSums
from maxlite.sharding import ROWS, Sharder


class MoeBlock(nn.Module):
  """Each token's weighted sum over its experts, plus the shared experts.

  Returns (y_BTD, RouterSums). Padding (segment 0) is sent to no expert.
  """

  cfg: ModelConfig
  sharder: Sharder

  def setup(self) -> None:
    cfg, moe = self.cfg, self.cfg.moe
    self.router = Router(moe, jnp.dtype(cfg.weight_dtype), cfg.family.router_bias)
    self.experts = Experts(cfg, self.sharder)
    nn.share_scope(self, self.experts)  # the experts' parameters have the block's path
    if moe.shared_experts:
      hidden_dim = moe.shared_experts * moe.base_moe_mlp_dim
      self.shared_experts = MLP(cfg, self.sharder, hidden_dim, moe.mlp_activations_limit)

  def __call__(self, x_BTD: jax.Array, segment_BT: jax.Array) -> tuple[jax.Array, RouterSums]:
    moe = self.cfg.moe
    route = self.router(x_BTD, segment_BT)
    masked_BTK = jnp.where(segment_BT[..., None] > 0, route.expert_BTK, moe.num_experts)
    y_BTD, num_dropped = self.experts(x_BTD, route.replace(expert_BTK=masked_BTK))
    if moe.shared_experts:
      y_BTD += self.shared_experts(x_BTD)
    sums = route.sums.replace(dropped=num_dropped.astype(route.sums.tokens.dtype))
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed")), sums
