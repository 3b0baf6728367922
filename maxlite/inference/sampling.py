"""Sampling: the distribution of the next token, as pure functions of logits.

Sampling parameters are arrays with an entry per row, so all requests share one compiled program.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """Sampling parameters of one request; `GenerateConfig` documents each under the same name."""

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0

  def __post_init__(self) -> None:
    """Raise UserError if a parameter is out of range."""
    for name, is_valid, allowed in (
      ("temperature", self.temperature >= 0, "0 or above"),
      ("top_k", self.top_k >= 0, "0 (all) or above"),
      ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
      ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
      ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
    ):
      if not is_valid:  # NaN is invalid too
        raise UserError(f"{name}={getattr(self, name)} must be {allowed}")


@struct.dataclass
class BatchSamplingParams:
  """`SamplingParams` of every row, as arrays."""

  temperature_B: jax.Array
  top_k_B: jax.Array
  top_p_B: jax.Array
  min_p_B: jax.Array
  repetition_penalty_B: jax.Array

  @classmethod
  def stack(cls, params: Sequence[SamplingParams]) -> "BatchSamplingParams":
    fields = dataclasses.fields(SamplingParams)
    dtypes = {int: np.int32, float: np.float32}
    column = lambda field: np.asarray([getattr(p, field.name) for p in params], dtypes[field.type])
    return cls(*map(column, fields))


def log_probs(logits_BV: jax.Array, seen_BV: jax.Array, params: BatchSamplingParams) -> jax.Array:
  """Return log_prob_BV, float32: the distribution to sample from.

  In this order: the repetition penalty divides positive logits of the tokens in `seen_BV` and
  multiplies negative ones; the temperature divides all logits; top_k keeps the k most likely
  tokens; top_p keeps the smallest set of these with that total probability; min_p keeps tokens at
  least that likely relative to the most likely one. Ties with the last token kept are kept. With
  temperature 0 all probability is on the argmax (the first of several).
  """
  logits_BV = logits_BV.astype(jnp.float32)
  penalty_B1 = params.repetition_penalty_B[:, None]
  penalized_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
  logits_BV = jnp.where(seen_BV, penalized_BV, logits_BV)
  is_greedy_B1 = params.temperature_B[:, None] == 0
  best_B1 = jnp.argmax(logits_BV, axis=-1, keepdims=True)
  token_1V = jnp.arange(logits_BV.shape[-1])[None]
  greedy_BV = jnp.where(token_1V == best_B1, 0, -jnp.inf)
  logits_BV /= jnp.where(is_greedy_B1, 1, params.temperature_B[:, None])
  needs_sort = jnp.any((params.top_k_B > 0) | (params.top_p_B < 1))  # most requests do not
  threshold_B1 = jax.lax.cond(
    needs_sort,
    _top_k_top_p_threshold,
    lambda logits_BV, _: jnp.full_like(logits_BV[:, :1], -jnp.inf),
    *(logits_BV, params),
  )
  max_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
  threshold_B1 = jnp.maximum(threshold_B1, max_B1 + jnp.log(params.min_p_B)[:, None])
  sampled_BV = jax.nn.log_softmax(jnp.where(logits_BV >= threshold_B1, logits_BV, -jnp.inf))
  return jnp.where(is_greedy_B1, greedy_BV, sampled_BV)


def sample(key_B: jax.Array, log_prob_BV: jax.Array) -> jax.Array:
  """Sample token_B, each row with its own key."""
  # Skip the random numbers, one per row and token, if every row has a single candidate (greedy).
  is_certain = jnp.all(jnp.sum(log_prob_BV > -jnp.inf, axis=-1) == 1)
  token_B = jax.lax.cond(
    is_certain,
    lambda _, log_prob_BV: jnp.argmax(log_prob_BV, axis=-1),
    jax.vmap(jax.random.categorical),
    *(key_B, log_prob_BV),
  )
  return token_B.astype(jnp.int32)


def _top_k_top_p_threshold(logits_BV: jax.Array, params: BatchSamplingParams) -> jax.Array:
  """Return the lowest logit that top_k and then top_p keep, [B, 1]."""
  size = logits_BV.shape[-1]
  sorted_BV = -jnp.sort(-logits_BV, axis=-1)
  rank_1V = jnp.arange(size)[None]
  top_k_B1 = jnp.where(params.top_k_B > 0, params.top_k_B, size)[:, None]
  sorted_BV = jnp.where(rank_1V < top_k_B1, sorted_BV, -jnp.inf)
  prob_BV = jax.nn.softmax(sorted_BV)
  before_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV
  kept_BV = (before_BV < params.top_p_B[:, None]) & (sorted_BV > -jnp.inf)
  return jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
