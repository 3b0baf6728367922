"""The mixture-of-experts block."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.registry import DISPATCHES
from maxlite.config.schema import LoraConfig, MoeConfig
from maxlite.layers.mlp import MLP, build_activation
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.layers.moe.experts import BI, BO, WI, WO, ExpertWeights
from maxlite.layers.moe.router import Router, RouterSums
from maxlite.sharding import Sharder


class MoeBlock(nn.Module):
  """(y_BTD, RouterSums): each token's weighted sum over its chosen experts, plus the shared ones.

  Padding (segment 0) goes to no expert.
  """

  cfg: MoeConfig
  activations: tuple[str, ...]
  weight_dtype: jnp.dtype
  sharder: Sharder
  lora: LoraConfig = LoraConfig()
  router_bias: bool = False  # as of Router

  @nn.compact
  def __call__(self, x_BTD: jax.Array, segment_BT: jax.Array) -> tuple[jax.Array, RouterSums]:
    cfg = self.cfg
    activation = build_activation(self.activations, cfg.mlp_activations_limit)
    router = Router(cfg, self.weight_dtype, self.router_bias, name="router")
    route = router(x_BTD, segment_BT)
    weights = self._weights(x_BTD.shape[-1])
    nowhere = jnp.where(segment_BT[..., None] > 0, route.expert_BTK, cfg.num_experts)
    dispatch = DISPATCHES[choose_dispatch(cfg)]
    y_BTD, num_dropped = dispatch(
      cfg, self.sharder, activation, x_BTD, route.replace(expert_BTK=nowhere), weights
    )
    if cfg.shared_experts:
      y_BTD += self._shared(x_BTD)
    names = ("activation_batch", "activation_length", "activation_embed")
    sums = route.sums.replace(dropped=num_dropped.astype(route.sums.tokens.dtype))
    return self.sharder.constrain(y_BTD, names), sums

  def _weights(self, width: int) -> ExpertWeights:
    hidden = self.cfg.base_moe_mlp_dim
    in_names = [f"wi_{i}" for i in range(len(self.activations))]
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
    wi_EDF = tuple(self._param(name, init, WI, width, hidden) for name in in_names)
    wo_EFD = self._param("wo", init, WO, hidden, width)
    if not self.cfg.expert_bias:
      return ExpertWeights(wi_EDF, wo_EFD, (), None)
    zeros = nn.initializers.zeros
    bi_EF = tuple(self._param(f"{name}_bias", zeros, BI, hidden) for name in in_names)
    return ExpertWeights(wi_EDF, wo_EFD, bi_EF, self._param("wo_bias", zeros, BO, width))

  def _param(self, name: str, init: Callable, names: tuple[str, ...], *shape: int) -> jax.Array:
    init = nn.with_logical_partitioning(init, names)
    return self.param(name, init, (self.cfg.num_experts, *shape), self.weight_dtype)

  def _shared(self, x_BTD: jax.Array) -> jax.Array:
    return MLP(
      self.cfg.shared_experts * self.cfg.base_moe_mlp_dim,
      self.activations,
      self.weight_dtype,
      self.sharder,
      limit=self.cfg.mlp_activations_limit,
      lora=self.lora,
      name="shared_experts",
    )(x_BTD)
