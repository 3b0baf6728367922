"""Sampling of the next token, and speculative sampling, as pure functions of logits.

Sampling parameters are arrays with an entry per row, so all requests share one compiled program.

Speculative sampling accepts draft tokens without changing the distribution of the output. The draft
heads propose the next tokens of a row, sampled from distributions q to which the row's sampling
parameters are applied. The model scores all drafts in one forward pass, which gives its own
distributions p.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), section
2.3, proof in appendix A.1; Chen et al., Accelerating Large Language Model Decoding with Speculative
Sampling (2023), algorithm 2.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.config.errors import UserError

# Folded into a row's key, for sampling drafts and for accepting them.
_DRAFT, _ACCEPT = np.uint32(2**32 - 1), np.uint32(2**32 - 2)
_MIN_TEMPERATURE = 1e-30  # logits divided by less overflow float32


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """Sampling parameters of one request, with the names of OpenAI's API; see `GenerateConfig`."""

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
  a temperature of 0 (below 1e-30) all probability is on the argmax (the first of several).
  """
  logits_BV = logits_BV.astype(jnp.float32)
  penalty_B1 = params.repetition_penalty_B[:, None]
  penalized_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
  logits_BV = jnp.where(seen_BV, penalized_BV, logits_BV)
  is_greedy_B1 = params.temperature_B[:, None] < _MIN_TEMPERATURE
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


@struct.dataclass
class Drafts:
  """J proposed tokens after the newest token of each row."""

  token_BJ: jax.Array
  log_q_BJV: jax.Array  # distribution that each draft was sampled from
  seen_BTV: jax.Array  # tokens seen before each draft, and (T = J + 1) after the last


# (key_B, position_B) to the keys that sample the tokens at these positions of the rows.
keys_at = jax.vmap(jax.random.fold_in)
_fold_in_all = jax.vmap(jax.random.fold_in, (0, None))


def propose(
  logits_BJV: jax.Array,
  seen_BV: jax.Array,
  params: BatchSamplingParams,
  key_B: jax.Array,
  first_B: jax.Array,
) -> Drafts:
  """Sample drafts for the positions from `first_B`, given the logits of the draft heads."""
  key_B = _fold_in_all(key_B, _DRAFT)
  tokens, log_qs, seen = [], [], [seen_BV]
  for j in range(logits_BJV.shape[1]):
    log_qs.append(log_probs(logits_BJV[:, j], seen[-1], params))
    tokens.append(sample(keys_at(key_B, first_B + j), log_qs[-1]))
    seen.append(seen[-1].at[jnp.arange(len(key_B)), tokens[-1]].set(True))
  stack = lambda arrays, empty: jnp.stack(arrays, axis=1) if arrays else empty
  token_BJ = stack(tokens, jnp.zeros((len(key_B), 0), jnp.int32))
  return Drafts(token_BJ, stack(log_qs, logits_BJV), jnp.stack(seen, axis=1))


def verify(
  drafts: Drafts, log_p_BTV: jax.Array, key_B: jax.Array, first_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Return (number of accepted drafts of each row, the token after them).

  A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected draft ends the
  sequence and is replaced by a sample from max(p - q, 0). If all are accepted, one more token is
  sampled from p.

  Args:
    log_p_BTV: the model's distribution at the position of each draft and at the one after them.
    first_B: position of the first draft in its row.
  """
  num_drafts, index_BJ1 = drafts.token_BJ.shape[1], drafts.token_BJ[..., None]
  of_draft = lambda log_BJV: jnp.take_along_axis(log_BJV, index_BJ1, axis=-1)[..., 0]
  log_ratio_BJ = of_draft(log_p_BTV[:, :num_drafts]) - of_draft(drafts.log_q_BJV)
  accept_key_B = keys_at(_fold_in_all(key_B, _ACCEPT), first_B)
  uniform_BJ = jax.vmap(lambda key: jax.random.uniform(key, num_drafts))(accept_key_B)
  is_accepted_BJ = uniform_BJ < jnp.exp(log_ratio_BJ)
  num_accepted_B = jnp.sum(jnp.cumprod(is_accepted_BJ.astype(jnp.int32), axis=1), axis=1)
  # After the last draft q is zero, so p - q is p.
  log_q_BTV = jnp.pad(drafts.log_q_BJV, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
  at = lambda log_BTV: jnp.take_along_axis(log_BTV, num_accepted_B[:, None, None], axis=1)[:, 0]
  log_p_BV, log_q_BV = at(log_p_BTV), at(log_q_BTV)
  residual_BV = jnp.maximum(jnp.exp(log_p_BV) - jnp.exp(log_q_BV), 0)
  # If p equals q, rounding may still reject a draft and leave no residual: sample from p.
  has_residual_B1 = jnp.any(residual_BV > 0, axis=-1, keepdims=True)
  use_p_B1 = (num_accepted_B == num_drafts)[:, None] | ~has_residual_B1
  last_key_B = keys_at(key_B, first_B + num_accepted_B)
  return num_accepted_B, sample(last_key_B, jnp.where(use_p_B1, log_p_BV, jnp.log(residual_BV)))
