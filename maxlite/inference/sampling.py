"""The distribution that the next token is drawn from: pure functions of logits, row by row.

Every row has rules of its own, as arrays, so requests with different wishes share one program.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class Rules:
  """How one text is sampled; the meaning of each is that of its key in `GenerateConfig`."""

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0

  def __post_init__(self) -> None:
    """Raises UserError, naming the rule."""
    for name, right, allowed in (
      ("temperature", self.temperature >= 0, "0 or above"),
      ("top_k", self.top_k >= 0, "0 (all) or above"),
      ("top_p", 0 < self.top_p <= 1, "above 0, at most 1"),
      ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
      ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
    ):
      if not right:  # also of nan
        raise UserError(f"{name}={getattr(self, name)} must be {allowed}")


@struct.dataclass
class RowRules:
  """`Rules` of every row, as arrays."""

  temperature_B: jax.Array
  top_k_B: jax.Array
  top_p_B: jax.Array
  min_p_B: jax.Array
  repetition_penalty_B: jax.Array

  @classmethod
  def of(cls, rules: Sequence[Rules]) -> "RowRules":
    fields = {
      f"{field.name}_B": np.asarray(
        [getattr(rule, field.name) for rule in rules], np.int32 if field.type is int else np.float32
      )
      for field in dataclasses.fields(Rules)
    }
    return cls(**fields)


def log_probs(logits_BV: jax.Array, seen_BV: jax.Array, rules: RowRules) -> jax.Array:
  """log_prob_BV, float32: the distribution that `rules` make of the model's.

  In this order: the repetition penalty divides positive logits of tokens in `seen_BV` and
  multiplies negative ones; the temperature divides all logits; top_k keeps so many of the
  likeliest; top_p of these the fewest that hold so much probability; min_p those that are at least
  so likely as a share of the likeliest. Tokens as likely as the last one kept are kept too. A
  temperature of 0 puts all probability on the likeliest token (of several: the first).
  """
  logits_BV = logits_BV.astype(jnp.float32)
  penalty_B1 = rules.repetition_penalty_B[:, None]
  penalized_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
  logits_BV = jnp.where(seen_BV, penalized_BV, logits_BV)
  is_greedy_B1 = rules.temperature_B[:, None] == 0
  best_B1 = jnp.argmax(logits_BV, axis=-1, keepdims=True)
  token_1V = jnp.arange(logits_BV.shape[-1])[None]
  greedy_BV = jnp.where(token_1V == best_B1, 0, -jnp.inf)
  logits_BV /= jnp.where(is_greedy_B1, 1, rules.temperature_B[:, None])
  cuts = jnp.any((rules.top_k_B > 0) | (rules.top_p_B < 1))  # a sort, which most do not need
  least_B1 = jax.lax.cond(cuts, _least_kept, _no_least, logits_BV, rules)
  least_B1 = jnp.maximum(
    least_B1, jnp.max(logits_BV, axis=-1, keepdims=True) + jnp.log(rules.min_p_B)[:, None]
  )
  sampled_BV = jax.nn.log_softmax(jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf))
  return jnp.where(is_greedy_B1, greedy_BV, sampled_BV)


def draw(key_B: jax.Array, log_prob_BV: jax.Array) -> jax.Array:
  """token_B, each drawn by its row's own key."""
  # Numbers are drawn for as many tokens as there are: not where each row has but one, as greedy.
  is_certain = jnp.all(jnp.sum(log_prob_BV > -jnp.inf, axis=-1) == 1)
  token_B = jax.lax.cond(
    is_certain,
    lambda _, log_prob_BV: jnp.argmax(log_prob_BV, axis=-1),
    jax.vmap(jax.random.categorical),
    *(key_B, log_prob_BV),
  )
  return token_B.astype(jnp.int32)


def _least_kept(logits_BV: jax.Array, rules: RowRules) -> jax.Array:
  """[B, 1] the lowest logit that top_k and then top_p keep."""
  size = logits_BV.shape[-1]
  sorted_BV = -jnp.sort(-logits_BV, axis=-1)
  rank_1V = jnp.arange(size)[None]
  top_k_B1 = jnp.where(rules.top_k_B > 0, rules.top_k_B, size)[:, None]
  sorted_BV = jnp.where(rank_1V < top_k_B1, sorted_BV, -jnp.inf)
  prob_BV = jax.nn.softmax(sorted_BV)
  before_BV = jnp.cumsum(prob_BV, axis=-1) - prob_BV
  kept_BV = (before_BV < rules.top_p_B[:, None]) & (sorted_BV > -jnp.inf)
  return jnp.min(jnp.where(kept_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)


def _no_least(logits_BV: jax.Array, rules: RowRules) -> jax.Array:
  del rules
  return jnp.full_like(logits_BV[:, :1], -jnp.inf)
