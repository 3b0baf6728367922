"""Auxiliary losses of the router, from sums over all tokens of the global batch."""

import jax
import jax.numpy as jnp

from maxlite.layers.moe.router import RouterSums


def load_balance_loss(sums_N: RouterSums, num_chosen: int) -> jax.Array:
  """E * sum_e (share of assignments to e) * (mean probability of e), mean over layers.

  It is 1 when both are even.

  Source: Fedus et al., Switch Transformers (2021), eq. 4 to 6, over the global batch and for top-k.
  """
  num_experts = sums_N.count_E.shape[-1]
  tokens_N1 = jnp.maximum(sums_N.tokens, 1)[:, None]
  share_NE = sums_N.count_E / (tokens_N1 * num_chosen)
  return num_experts * jnp.mean(jnp.sum(share_NE * sums_N.prob_E / tokens_N1, axis=-1))


def router_z_loss(sums_N: RouterSums) -> jax.Array:
  """Mean over tokens and layers of the squared log-partition of the router's logits.

  Source: Zoph et al., ST-MoE (2022), eq. 5.
  """
  return jnp.mean(sums_N.z / jnp.maximum(sums_N.tokens, 1))
