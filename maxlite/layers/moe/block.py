"""The mixture-of-experts block."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import MoeConfig
from maxlite.kernels.grouped_matmul.api import resolve_backend
from maxlite.layers.moe.dispatch import build_plan, combine, send
from maxlite.layers.moe.experts import apply_experts
from maxlite.layers.moe.router import Router, RouterSums
from maxlite.parallel import Sharder
from maxlite.parallel.vary import vary


class MoeBlock(nn.Module):
  """(y_BTD, RouterSums): each token's weighted sum over its chosen experts; none is dropped.

  Tokens stay on their shard: every shard sorts its own tokens and applies all experts to them,
  with the experts' hidden axis cut over the mesh axes of `mlp`.
  """

  cfg: MoeConfig
  activations: tuple[str, ...]
  weight_dtype: jnp.dtype
  sharder: Sharder

  @nn.compact
  def __call__(self, x_BTD: jax.Array, segment_BT: jax.Array) -> tuple[jax.Array, RouterSums]:
    cfg = self.cfg
    route = Router(
      cfg.num_experts,
      cfg.num_experts_per_tok,
      cfg.norm_topk_prob,
      cfg.router_jitter,
      self.weight_dtype,
      name="router",
    )(x_BTD, segment_BT)
    wi_EDF = tuple(
      self._kernel(f"wi_{i}", x_BTD.shape[-1], cfg.base_moe_mlp_dim, ("exp", "embed_no_exp", "mlp"))
      for i in range(len(self.activations))
    )
    wo_EFD = self._kernel(
      "wo", cfg.base_moe_mlp_dim, x_BTD.shape[-1], ("exp", "mlp", "embed_no_exp")
    )
    y_BTD = self._experts(x_BTD, route.expert_BTK, route.weight_BTK, wi_EDF, wo_EFD)
    return y_BTD, route.sums

  def _kernel(self, name: str, dim_in: int, dim_out: int, names: tuple[str, ...]) -> jax.Array:
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", batch_axis=(0,))
    init = nn.with_logical_partitioning(init, names)
    return self.param(name, init, (self.cfg.num_experts, dim_in, dim_out), self.weight_dtype)

  def _experts(self, x_BTD, expert_BTK, weight_BTK, wi_EDF, wo_EFD) -> jax.Array:
    spec = self.sharder.spec
    row_spec = spec(("activation_batch", "activation_length", None))
    wi_spec, wo_spec = spec((None, None, "mlp")), spec((None, "mlp", None))
    mlp_axes = self.sharder.mesh_axes("mlp")

    def local(x_btd, expert_btk, weight_btk, wi_EDf, wo_EfD):
      y_btd = self._local_experts(x_btd, expert_btk, weight_btk, wi_EDf, wo_EfD)
      return jax.lax.psum(y_btd, mlp_axes)

    return jax.shard_map(
      local,
      mesh=self.sharder.mesh,
      in_specs=(row_spec, row_spec, row_spec, wi_spec, wo_spec),
      out_specs=row_spec,
    )(x_BTD, expert_BTK, weight_BTK, wi_EDF, wo_EFD)

  def _local_experts(self, x_btd, expert_btk, weight_btk, wi_EDf, wo_EfD) -> jax.Array:
    num_experts, dim = self.cfg.num_experts, x_btd.shape[-1]
    x_btd, expert_btk, weight_btk, wo_EfD, *wi_EDf = vary(
      x_btd, expert_btk, weight_btk, wo_EfD, *wi_EDf
    )
    plan = build_plan(expert_btk.reshape(-1, expert_btk.shape[-1]), num_experts)
    x_md = send(x_btd.reshape(-1, dim), plan)
    y_md = apply_experts(
      x_md,
      tuple(wi_EDf),
      wo_EfD,
      plan.group_sizes_E,
      self.activations[0],
      resolve_backend(self.cfg.grouped_matmul, self.sharder.platform),
    )
    return combine(y_md, weight_btk.reshape(-1, weight_btk.shape[-1]), plan).reshape(x_btd.shape)
