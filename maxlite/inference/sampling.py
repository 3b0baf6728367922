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
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.errors import UserError

# Folded into a row's key, for sampling drafts and for accepting them.
_DRAFT = np.uint32(2**32 - 1)
_ACCEPT = np.uint32(2**32 - 2)
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
    """Raise UserError if a parameter is out of range or NaN."""
    if not self.temperature >= 0:
      raise UserError(f"temperature={self.temperature} must be 0 or above")
    if not self.top_k >= 0:
      raise UserError(f"top_k={self.top_k} must be 0 (all) or above")
    if not 0 < self.top_p <= 1:
      raise UserError(f"top_p={self.top_p} must be above 0, at most 1")
    if not 0 <= self.min_p <= 1:
      raise UserError(f"min_p={self.min_p} must be from 0 to 1")
    if not self.repetition_penalty > 0:
      raise UserError(f"repetition_penalty={self.repetition_penalty} must be above 0")


@struct.dataclass
class BatchSamplingParams:
  """`SamplingParams` of every row, as arrays."""

  temperature_B: jax.Array | np.ndarray
  top_k_B: jax.Array | np.ndarray
  top_p_B: jax.Array | np.ndarray
  min_p_B: jax.Array | np.ndarray
  repetition_penalty_B: jax.Array | np.ndarray

  @classmethod
  def stack(cls, params: Sequence[SamplingParams]) -> "BatchSamplingParams":
    """The parameters of the rows `params`, in order."""
    return cls(
      temperature_B=_float32([each.temperature for each in params]),
      top_k_B=_int32([each.top_k for each in params]),
      top_p_B=_float32([each.top_p for each in params]),
      min_p_B=_float32([each.min_p for each in params]),
      repetition_penalty_B=_float32([each.repetition_penalty for each in params]),
    )


def _float32(numbers: Sequence[float]) -> np.ndarray:
  return np.asarray(numbers, np.float32)


def _int32(numbers: Sequence[int]) -> np.ndarray:
  return np.asarray(numbers, np.int32)


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
    _no_threshold,
    logits_BV,
    params,
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
    _most_likely,
    jax.vmap(jax.random.categorical),
    key_B,
    log_prob_BV,
  )
  return token_B.astype(jnp.int32)


def _most_likely(key_B: jax.Array, log_prob_BV: jax.Array) -> jax.Array:
  del key_B
  return jnp.argmax(log_prob_BV, axis=-1)


def _no_threshold(logits_BV: jax.Array, params: BatchSamplingParams) -> jax.Array:
  """Return a logit that all tokens reach, [B, 1]."""
  del params
  return jnp.full_like(logits_BV[:, :1], -jnp.inf)


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
  """J proposed tokens after the newest token of each row.

  Attributes:
    token_BJ: the drafts.
    log_q_BJV: log of the distribution that each draft was sampled from.
    seen_BTV: whether a token was seen before each draft, and (T = J + 1) after the last.
  """

  token_BJ: jax.Array
  log_q_BJV: jax.Array
  seen_BTV: jax.Array


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
  num_rows, num_drafts, _ = logits_BJV.shape
  if num_drafts == 0:
    no_token_BJ = jnp.zeros((num_rows, 0), jnp.int32)
    return Drafts(no_token_BJ, logits_BJV, seen_BV[:, None])

  def logits_after(tokens: list[jax.Array]) -> jax.Array:
    return logits_BJV[:, len(tokens)]

  return propose_in_turn(num_drafts, logits_after, seen_BV, params, key_B, first_B)


def propose_in_turn(
  num_drafts: int,
  logits_after: Callable[[list[jax.Array]], jax.Array],
  seen_BV: jax.Array,
  params: BatchSamplingParams,
  key_B: jax.Array,
  first_B: jax.Array,
) -> Drafts:
  """As `propose`, where the logits of a draft may depend on the drafts before it.

  Args:
    num_drafts: number of drafts, at least 1.
    logits_after: computes logits_BV of the next draft from the drafts so far, token_B each. It is
      called once per draft.
    seen_BV: whether the token occurs in the prompt or completion.
    params: the sampling parameters.
    key_B: the keys of the rows.
    first_B: position of the first draft in its row.
  """
  num_rows = len(seen_BV)
  draft_key_B = _fold_in_all(key_B, _DRAFT)
  row_B = jnp.arange(num_rows)
  tokens: list[jax.Array] = []
  log_qs: list[jax.Array] = []
  seen = [seen_BV]
  for j in range(num_drafts):
    log_q_BV = log_probs(logits_after(tokens), seen_BV, params)
    token_B = sample(keys_at(draft_key_B, first_B + j), log_q_BV)
    seen_BV = seen_BV.at[row_B, token_B].set(True)
    tokens.append(token_B)
    log_qs.append(log_q_BV)
    seen.append(seen_BV)
  return Drafts(
    token_BJ=jnp.stack(tokens, axis=1),
    log_q_BJV=jnp.stack(log_qs, axis=1),
    seen_BTV=jnp.stack(seen, axis=1),
  )


class Verified(NamedTuple):
  """What a decode step generates.

  Attributes:
    num_accepted_B: number of accepted drafts of each row.
    token_B: the token after them.
  """

  num_accepted_B: jax.Array
  token_B: jax.Array


def verify(drafts: Drafts, log_p_BTV: jax.Array, key_B: jax.Array, first_B: jax.Array) -> Verified:
  """Accept drafts of each row, and sample the token after them.

  A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected draft ends the
  sequence and is replaced by a sample from max(p - q, 0). If all are accepted, one more token is
  sampled from p.

  Args:
    drafts: the drafts.
    log_p_BTV: the model's distribution at the position of each draft and at the one after them.
    key_B: the keys of the rows.
    first_B: position of the first draft in its row.
  """
  num_drafts = drafts.token_BJ.shape[1]
  log_p_BJ = _at_tokens(log_p_BTV[:, :num_drafts], drafts.token_BJ)
  log_q_BJ = _at_tokens(drafts.log_q_BJV, drafts.token_BJ)
  log_ratio_BJ = log_p_BJ - log_q_BJ
  accept_key_B = keys_at(_fold_in_all(key_B, _ACCEPT), first_B)
  uniform_BJ = jax.vmap(lambda key: jax.random.uniform(key, (num_drafts,)))(accept_key_B)
  is_accepted_BJ = uniform_BJ < jnp.exp(log_ratio_BJ)
  num_accepted_B = jnp.sum(jnp.cumprod(is_accepted_BJ.astype(jnp.int32), axis=1), axis=1)
  # After the last draft q is zero, so p - q is p.
  log_q_BTV = jnp.pad(drafts.log_q_BJV, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
  log_p_BV = _at_positions(log_p_BTV, num_accepted_B)
  log_q_BV = _at_positions(log_q_BTV, num_accepted_B)
  residual_BV = jnp.maximum(jnp.exp(log_p_BV) - jnp.exp(log_q_BV), 0)
  # If p equals q, rounding may still reject a draft and leave no residual: sample from p.
  has_residual_B1 = jnp.any(residual_BV > 0, axis=-1, keepdims=True)
  use_p_B1 = (num_accepted_B == num_drafts)[:, None] | ~has_residual_B1
  log_prob_BV = jnp.where(use_p_B1, log_p_BV, jnp.log(residual_BV))
  last_key_B = keys_at(key_B, first_B + num_accepted_B)
  token_B = sample(last_key_B, log_prob_BV)
  return Verified(num_accepted_B, token_B)


def accepted_tokens(
  drafts: Drafts, num_accepted_B: jax.Array, last_token_B: jax.Array, padding: int
) -> jax.Array:
  """Return token_BT: of each row the accepted drafts, the token after them, then padding."""
  num_drafts = drafts.token_BJ.shape[1]
  column_1T = jnp.arange(num_drafts + 1, dtype=jnp.int32)[None]
  num_accepted_B1 = num_accepted_B[:, None]
  drafted_BT = jnp.pad(drafts.token_BJ, ((0, 0), (0, 1)))
  token_BT = jnp.where(column_1T < num_accepted_B1, drafted_BT, last_token_B[:, None])
  return jnp.where(column_1T <= num_accepted_B1, token_BT, padding)


def _at_tokens(log_BJV: jax.Array, token_BJ: jax.Array) -> jax.Array:
  """Return the entries [B, J] of the tokens."""
  return jnp.take_along_axis(log_BJV, token_BJ[..., None], axis=-1)[..., 0]


def _at_positions(log_BTV: jax.Array, position_B: jax.Array) -> jax.Array:
  """Return the entries [B, V] at a position of each row."""
  return jnp.take_along_axis(log_BTV, position_B[:, None, None], axis=1)[:, 0]
