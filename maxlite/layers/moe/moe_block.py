"""The mixture-of-experts block."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.layer_specs import MlpSpec, MoeSpec
from maxlite.layers.linear import Linear, LinearClass
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.dispatch import DispatchCounts, choose_dispatch
from maxlite.layers.moe.experts import ExpertParameters, build_experts
from maxlite.layers.moe.router import Route, Router, RouterSums
from maxlite.sharding import ROWS, Sharder


class MoeBlock(nn.Module):
  """Each token's weighted sum over its experts, plus the shared experts.

  Returns (y_BTD, RouterSums). Padding (segment 0) is sent to no expert. The experts get x_BTD; a
  scaled router chooses them by residual_BTD, of which x_BTD is the norm. With `scales_inputs` of
  the spec's form, a token has one expert, and its weight multiplies x_BTD instead of the output.
  """

  cfg: ModelConfig
  sharder: Sharder
  spec: MoeSpec
  linear: LinearClass = Linear  # The class of the shared experts' linear layers.

  def setup(self) -> None:
    cfg = self.cfg
    moe = cfg.moe
    self.router = Router(
      moe,
      jnp.dtype(cfg.weight_dtype),
      self.spec.form.router_bias,
      self.spec.form.scaled_router,
      cfg.normalization_layer_epsilon,
    )
    self.expert_parameters = ExpertParameters(cfg)
    nn.share_scope(self, self.expert_parameters)  # The experts' parameters have the block's path.
    if moe.shared_experts:
      self.shared_experts = MLP(
        cfg,
        self.sharder,
        MlpSpec(moe.shared_experts * moe.base_moe_mlp_dim, moe.mlp_activations_limit),
        linear=self.linear,
      )
      if self.spec.form.gated_shared_expert:
        self.shared_expert_gate = self.linear(
          cfg, self.sharder, features=(1,), kernel_names=("embed", "router")
        )

  def __call__(
    self,
    x_BTD: jax.Array,
    segment_BT: jax.Array,
    residual_BTD: jax.Array | None = None,
  ) -> tuple[jax.Array, RouterSums]:
    routed_BTD = x_BTD
    if self.spec.form.scaled_router:
      assert residual_BTD is not None
      routed_BTD = residual_BTD
    with jax.named_scope("route"):
      route = self.router(routed_BTD, segment_BT)
      route = _mask_padding(route, segment_BT, self.cfg.moe.num_experts)
    expert_BTD = x_BTD
    if self.spec.form.scales_inputs:
      expert_BTD, route = _with_scaled_input(x_BTD, route)

    dispatch = choose_dispatch(self.cfg.moe).apply_experts
    experts = build_experts(self.cfg, self.sharder)
    weights = self.expert_parameters(x_BTD.shape[-1])
    y_BTD, counts = dispatch(experts, expert_BTD, route, weights)

    if self.cfg.moe.shared_experts:
      y_BTD += self._shared(x_BTD)
    sums = _add_counts(route.sums, counts)
    return self.sharder.constrain(y_BTD, (*ROWS, "activation_embed")), sums

  def _shared(self, x_BTD: jax.Array) -> jax.Array:
    """The output of the shared experts, multiplied by its gate if they have one."""
    y_BTD = self.shared_experts(x_BTD)
    if not self.spec.form.gated_shared_expert:
      return y_BTD
    gate_BT1 = jax.nn.sigmoid(self.shared_expert_gate(x_BTD))
    # In float32, so that the gate's gradient is summed in it; the rounded product is the same.
    wide = accumulator_dtype(y_BTD.dtype)
    gated_BTD = y_BTD.astype(wide) * gate_BT1.astype(wide)
    return gated_BTD.astype(y_BTD.dtype)


def _with_scaled_input(x_BTD: jax.Array, route: Route) -> tuple[jax.Array, Route]:
  """(x_BTD multiplied by the weight of each token's one expert, the route with weights of 1).

  Source: the code published with Llama 4 (2025).
  """
  assert route.weight_BTK.shape[-1] == 1, route.weight_BTK.shape
  scaled_BTD = x_BTD * route.weight_BTK.astype(x_BTD.dtype)
  return scaled_BTD, route.replace(weight_BTK=jnp.ones_like(route.weight_BTK))


def _add_counts(sums: RouterSums, counts: DispatchCounts) -> RouterSums:
  """The router's sums with the counts of the dispatch, in their type."""
  dtype = sums.tokens.dtype
  overfull_F = None
  if counts.overfull_F is not None:
    overfull_F = counts.overfull_F.astype(dtype)
  return sums.replace(dropped=counts.dropped.astype(dtype), overfull_F=overfull_F)


def _mask_padding(route: Route, segment_BT: jax.Array, num_experts: int) -> Route:
  """`route` with padding assigned to expert `num_experts`, which does not exist."""
  is_real_BT1 = segment_BT[..., None] > 0
  return route.replace(expert_BTK=jnp.where(is_real_BT1, route.expert_BTK, num_experts))
