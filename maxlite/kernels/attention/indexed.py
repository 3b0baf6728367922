"""Attention to the keys that an indexer selects, and the divergence that the indexer learns from.

The functions compute all scores of the given queries; layers/indexed_attention.py calls them for
one block of queries after the other. Everything is float32 (float64 if the operands are).

Source: DeepSeek-AI, DeepSeek-V3.2 (2025), section 2.1.
"""

import jax
import jax.numpy as jnp

from maxlite.kernels.numerics import accumulator_dtype, dot


def index_scores(q_BTIC: jax.Array, k_BSC: jax.Array, weight_BTI: jax.Array) -> jax.Array:
  """score_BTS: the sum over the indexer's heads I of weight * relu(q k). Source: eq. 1."""
  dtype = accumulator_dtype(q_BTIC.dtype)
  num_rows, num_queries, num_heads, num_channels = q_BTIC.shape
  q_BtC = q_BTIC.astype(dtype).reshape(num_rows, num_queries * num_heads, num_channels)
  product_BtS = dot(q_BtC, k_BSC.astype(dtype), (2, 2), 1)
  product_BTIS = product_BtS.reshape(num_rows, num_queries, num_heads, -1)
  weight_BTI = weight_BTI.astype(dtype)
  return jnp.einsum("bti,btis->bts", weight_BTI, jax.nn.relu(product_BTIS))


def select(score_BTS: jax.Array, visible_BTS: jax.Array, num_keys: int) -> jax.Array:
  """[B, T, S] which keys each query attends: of the visible ones the `num_keys` best.

  Of equal scores the first keys are selected, so that exactly `num_keys` are. Scores get no
  gradient.

  Args:
    num_keys: 0, or as many as there are keys: all visible ones.
  """
  if not 0 < num_keys < score_BTS.shape[-1]:
    return visible_BTS
  score_BTS = jnp.where(visible_BTS, jax.lax.stop_gradient(score_BTS), -jnp.inf)
  best_BTK, _ = jax.lax.top_k(score_BTS, num_keys)
  lowest_BT1 = best_BTK[..., -1:]
  above_BTS = score_BTS > lowest_BT1
  equal_BTS = score_BTS == lowest_BT1
  num_equal_BT1 = num_keys - jnp.sum(above_BTS, axis=-1, keepdims=True, dtype=jnp.int32)
  is_first_BTS = jnp.cumsum(equal_BTS, axis=-1, dtype=jnp.int32) <= num_equal_BT1
  # A query with fewer visible keys has -inf as its lowest.
  return (above_BTS | (equal_BTS & is_first_BTS)) & visible_BTS


def attention(
  q_BTHC: jax.Array,
  k_BSHC: jax.Array,
  v_BSHC: jax.Array,
  attended_BTS: jax.Array,
  scale: float,
) -> tuple[jax.Array, jax.Array]:
  """(o_BTHC, mass_BTS: the probability of each key, summed over the heads)."""
  dtype = accumulator_dtype(q_BTHC.dtype)
  q_BTHC, k_BSHC, v_BSHC = (x.astype(dtype) for x in (q_BTHC, k_BSHC, v_BSHC))
  score_BHTS = jnp.einsum("bthc,bshc->bhts", q_BTHC, k_BSHC) * scale
  score_BHTS = jnp.where(attended_BTS[:, None], score_BHTS, jnp.finfo(dtype).min)
  p_BHTS = jax.nn.softmax(score_BHTS)
  o_BTHC = jnp.einsum("bhts,bshc->bthc", p_BHTS, v_BSHC)
  return o_BTHC, jnp.sum(p_BHTS, axis=1)


def divergence(mass_BTS: jax.Array, score_BTS: jax.Array, attended_BTS: jax.Array) -> jax.Array:
  """divergence_BT [nats] of the indexer's distribution from that of attention, over attended keys.

  Args:
    mass_BTS: the probabilities of attention, summed over all heads. They get no gradient.
    score_BTS: the indexer's, of which the softmax is its distribution.

  Source: eq. 3, and eq. 4 where only selected keys are attended.
  """
  mass_BTS = jax.lax.stop_gradient(mass_BTS)
  p_BTS = mass_BTS / jnp.sum(mass_BTS, axis=-1, keepdims=True)
  score_BTS = jnp.where(attended_BTS, score_BTS, jnp.finfo(score_BTS.dtype).min)
  log_q_BTS = jax.nn.log_softmax(score_BTS)
  entropy_BTS = jax.scipy.special.xlogy(p_BTS, p_BTS)
  # Keys that are not attended have no mass, and a finite log_q.
  return jnp.sum(entropy_BTS - p_BTS * log_q_BTS, axis=-1)
