"""Every expert on every token: the reference for the other strategies."""

import jax
import jax.numpy as jnp

from maxlite.layers.moe.expert_choice import is_chosen
from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.router import Route


def apply_experts(
  mlp: ExpertMlp, x_BTD: jax.Array, route: Route, weights: ExpertWeights
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, 0); work and memory grow with the number of experts."""
  chosen_BTKE = is_chosen(route.expert_BTK, mlp.cfg.num_experts)
  weight_BTE = jnp.sum(jnp.where(chosen_BTKE, route.weight_BTK[..., None], 0), axis=2)
  weight_BTE = weight_BTE.astype(x_BTD.dtype)
  y_BTD = dense_mlp(mlp, x_BTD, weight_BTE, weights, "btd", "btef", "btd")
  return y_BTD, jnp.zeros((), jnp.int32)


def dense_mlp(
  mlp: ExpertMlp,
  x: jax.Array,
  weight: jax.Array,
  weights: ExpertWeights,
  x_axes: str,
  h_axes: str,
  y_axes: str,
) -> jax.Array:
  """The experts' networks as einsums over arrays with these axes, where `e` is experts.

  `weight` has the axes of the hidden layer without the last one, `f`.
  """
  dtype, has_bias = x.dtype, weights.bo_ED is not None
  up = [jnp.einsum(f"{x_axes},edf->{h_axes}", x, w.astype(dtype)) for w in weights.wi_EDF]
  if has_bias:
    others = [i for i, axis in enumerate(h_axes) if axis not in "ef"]
    biases = [jnp.expand_dims(b_EF.astype(dtype), others) for b_EF in weights.bi_EF]
    up = [h + b for h, b in zip(up, biases, strict=True)]
  h = mlp.activation(*up) * weight[..., None]
  y = jnp.einsum(f"{h_axes},efd->{y_axes}", h, weights.wo_EFD.astype(dtype))
  if has_bias:
    y += jnp.einsum(f"{h_axes[:-1]},ed->{y_axes}", weight, weights.bo_ED.astype(dtype))
  return y
