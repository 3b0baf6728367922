"""Every expert on every token: the reference for the other strategies."""

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.dispatch import Dispatch, DispatchCounts
from maxlite.layers.moe.expert_choice import is_chosen
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.router import Route


def _is_selected(cfg: MoeConfig) -> bool:
  return not cfg.sparse_matmul and cfg.capacity_factor <= 0


def apply_experts(
  experts: ExpertMlp,
  x_BTD: jax.Array,
  route: Route,
  weights: ExpertWeights,
) -> tuple[jax.Array, DispatchCounts]:
  """(y_BTD, 0); work and memory grow with the number of experts."""
  chosen_BTKE = is_chosen(route.expert_BTK, experts.cfg.num_experts)
  weight_BTE = jnp.sum(jnp.where(chosen_BTKE, route.weight_BTK[..., None], 0), axis=2)
  with jax.named_scope("experts"):
    y_BTD = dense_mlp(
      experts,
      x_BTD,
      weight_BTE.astype(x_BTD.dtype),
      weights,
      x_axes="btd",
      h_axes="btef",
      y_axes="btd",
    )
  num_dropped = jnp.zeros((), jnp.int32)
  return y_BTD, DispatchCounts(num_dropped)


def dense_mlp(
  experts: ExpertMlp,
  x: jax.Array,
  weight: jax.Array,
  weights: ExpertWeights,
  *,
  x_axes: str,
  h_axes: str,
  y_axes: str,
) -> jax.Array:
  """The experts' networks as einsums over arrays with these axes, where `e` is experts.

  Args:
    weight: the routing weights, with the axes of the hidden layer without its last one, `f`.
    h_axes: the axes of the hidden layer.
  """
  dtype = x.dtype
  up = []
  for wi_EDF in weights.wi_EDF:
    up.append(jnp.einsum(f"{x_axes},edf->{h_axes}", x, wi_EDF.astype(dtype)))
  if weights.bi_EF:
    missing_axes = [i for i, axis in enumerate(h_axes) if axis not in "ef"]
    for i, bi_EF in enumerate(weights.bi_EF):
      up[i] = up[i] + jnp.expand_dims(bi_EF.astype(dtype), missing_axes)
  r_axes = h_axes[:-1] + "r"  # between the factors of an adapter
  for i, factors in enumerate(weights.wi_lora):
    low_rank = jnp.einsum(f"{x_axes},edr->{r_axes}", x, factors.a.astype(dtype))
    up[i] = up[i] + jnp.einsum(f"{r_axes},erf->{h_axes}", low_rank, factors.b.astype(dtype))
  h = experts.activation(*up) * weight[..., None]
  y = jnp.einsum(f"{h_axes},efd->{y_axes}", h, weights.wo_EFD.astype(dtype))
  if weights.wo_lora is not None:
    low_rank = jnp.einsum(f"{h_axes},efr->{r_axes}", h, weights.wo_lora.a.astype(dtype))
    y += jnp.einsum(f"{r_axes},erd->{y_axes}", low_rank, weights.wo_lora.b.astype(dtype))
  if weights.bo_ED is not None:
    weight_axes = h_axes[:-1]
    y += jnp.einsum(f"{weight_axes},ed->{y_axes}", weight, weights.bo_ED.astype(dtype))
  return y


DISPATCH = Dispatch(apply_experts, _is_selected)
