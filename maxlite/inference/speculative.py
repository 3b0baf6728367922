"""Speculative sampling: accept draft tokens without changing the distribution of the output.

The draft heads propose the next tokens of a row, sampled from distributions q to which the row's
sampling parameters are applied. The model scores all drafts in one forward pass, which gives its
own distributions p.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), section
2.3, proof in appendix A.1; Chen et al., Accelerating Large Language Model Decoding with Speculative
Sampling (2023), algorithm 2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.inference.sampling import BatchSamplingParams, log_probs, sample

# Folded into a row's key, for sampling drafts and for accepting them.
_DRAFT, _ACCEPT = np.uint32(2**32 - 1), np.uint32(2**32 - 2)


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
