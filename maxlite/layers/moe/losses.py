"""Auxiliary losses of the router, computed from sums over all tokens of the global batch."""

import jax
import jax.numpy as jnp

from maxlite.config.schema import MoeConfig
from maxlite.layers.moe.router import RouterSums


def load_balance_loss(sums_N: RouterSums, cfg: MoeConfig) -> jax.Array:
  """Mean over layers of the load imbalance; 1 for an even load.

  By load_balance_loss_scope, `batch`: E * sum_e (share of assignments to e) * (mean probability of
  e) over the global batch; `sequence`: the same within each row, averaged over the rows with at
  least one token.

  Source: Fedus et al., Switch Transformers (2021), eq. 4 to 6, for top-k; for `sequence`
  DeepSeek-AI, DeepSeek-V3 (2024), eq. 17 to 20.
  """
  if cfg.load_balance_loss_scope == "sequence":
    rows_N = jnp.maximum(sums_N.rows, 1)
    return jnp.mean(sums_N.row_balance / rows_N)
  num_experts = sums_N.count_E.shape[-1]
  tokens_N1 = jnp.maximum(sums_N.tokens, 1)[:, None]
  share_NE = sums_N.count_E / (tokens_N1 * cfg.num_experts_per_tok)
  product_NE = share_NE * sums_N.prob_E / tokens_N1
  product_N = jnp.sum(product_NE, axis=-1)
  return num_experts * jnp.mean(product_N)


def router_z_loss(sums_N: RouterSums) -> jax.Array:
  """Mean over tokens and layers of the squared log-partition of the router's logits.

  Source: Zoph et al., ST-MoE (2022), eq. 5.
  """
  tokens_N = jnp.maximum(sums_N.tokens, 1)
  return jnp.mean(sums_N.z / tokens_N)
