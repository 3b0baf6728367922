"""Every expert on every token: the reference for the other strategies."""

import jax
import jax.numpy as jnp

from maxlite.layers.moe.experts import ExpertMlp, ExpertWeights
from maxlite.layers.moe.router import Route


def apply_experts(
  mlp: ExpertMlp, x_BTD: jax.Array, route: Route, weights: ExpertWeights
) -> tuple[jax.Array, jax.Array]:
  """(y_BTD, 0); work and memory grow with the number of experts."""
  experts_E = jnp.arange(mlp.cfg.num_experts, dtype=route.expert_BTK.dtype)
  chosen_BTKE = route.expert_BTK[..., None] == experts_E[None, None, None]
  weight_BTE = jnp.sum(jnp.where(chosen_BTKE, route.weight_BTK[..., None], 0), axis=2)
  dtype = x_BTD.dtype
  up = [jnp.einsum("btd,edf->btef", x_BTD, w_EDF.astype(dtype)) for w_EDF in weights.wi_EDF]
  if weights.bo_ED is not None:
    up = [h + b_EF.astype(dtype)[None, None] for h, b_EF in zip(up, weights.bi_EF, strict=True)]
  h_BTEF = mlp.activation(*up) * weight_BTE[..., None].astype(dtype)
  y_BTD = jnp.einsum("btef,efd->btd", h_BTEF, weights.wo_EFD.astype(dtype))
  if weights.bo_ED is not None:
    y_BTD += jnp.einsum("bte,ed->btd", weight_BTE.astype(dtype), weights.bo_ED.astype(dtype))
  return y_BTD, jnp.zeros((), jnp.int32)
