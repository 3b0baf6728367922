"""Speculative sampling: drafts are taken or not so that texts are distributed as without them.

The drafts of a row are the next tokens as its draft heads guess them, drawn from distributions q
that the row's rules have made of theirs. The model reads all at once, and says with p how it would
have drawn each.

Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023), section
2.3, whose appendix A.1 has the proof; Chen et al., Accelerating Large Language Model Decoding with
Speculative Sampling (2023), algorithm 2.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.inference.sampling import RowRules, draw, log_probs

# Draws for drafts, and whether these are taken, have keys of their own beside a row's.
_DRAFT, _TAKE = np.uint32(2**32 - 1), np.uint32(2**32 - 2)


@struct.dataclass
class Drafts:
  """Tokens that may follow the newest of each row, as many as there are J."""

  token_BJ: jax.Array
  log_q_BJV: jax.Array  # what each was drawn from
  seen_BTV: jax.Array  # what the text has before each, and (T = J + 1) behind the last


def keys_at(key_B: jax.Array, position_B: jax.Array) -> jax.Array:
  """The keys that draw the tokens at these positions of the rows' texts."""
  return jax.vmap(jax.random.fold_in)(key_B, position_B)


def propose(
  logits_BJV: jax.Array, seen_BV: jax.Array, rules: RowRules, key_B: jax.Array, first_B: jax.Array
) -> Drafts:
  """Drafts for the positions from `first_B` on, from the logits of the draft heads."""
  key_B = _own_keys(key_B, _DRAFT)
  tokens, log_qs, seen = [], [], [seen_BV]
  for j in range(logits_BJV.shape[1]):
    log_qs.append(log_probs(logits_BJV[:, j], seen[-1], rules))
    tokens.append(draw(keys_at(key_B, first_B + j), log_qs[-1]))
    seen.append(seen[-1].at[jnp.arange(len(key_B)), tokens[-1]].set(True))
  stacked = lambda of, empty: jnp.stack(of, axis=1) if of else empty
  return Drafts(
    stacked(tokens, jnp.zeros((len(key_B), 0), jnp.int32)),
    stacked(log_qs, logits_BJV),
    jnp.stack(seen, axis=1),
  )


def verify(
  drafts: Drafts, log_p_BTV: jax.Array, key_B: jax.Array, first_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(how many drafts of each row are taken, the token behind these).

  A draft x is taken with probability min(1, p(x) / q(x)), up to the first that is not. In its place
  comes a token drawn from max(p - q, 0); behind drafts that are all taken, one from p.

  Args:
    log_p_BTV: the model's distribution for every draft's position, and for the one behind the last.
    first_B: position of the first draft in its text.
  """
  num_drafts, index_BJ1 = drafts.token_BJ.shape[1], drafts.token_BJ[..., None]
  of_draft = lambda log_BJV: jnp.take_along_axis(log_BJV, index_BJ1, axis=-1)[..., 0]
  log_ratio_BJ = of_draft(log_p_BTV[:, :num_drafts]) - of_draft(drafts.log_q_BJV)
  take_key_B = keys_at(_own_keys(key_B, _TAKE), first_B)
  uniform_BJ = jax.vmap(lambda key: jax.random.uniform(key, num_drafts))(take_key_B)
  is_taken_BJ = uniform_BJ < jnp.exp(log_ratio_BJ)
  num_taken_B = jnp.sum(jnp.cumprod(is_taken_BJ.astype(jnp.int32), axis=1), axis=1)
  # Behind the last draft q is nowhere, and what is left of p is p.
  log_q_BTV = jnp.pad(drafts.log_q_BJV, ((0, 0), (0, 1), (0, 0)), constant_values=-jnp.inf)
  at = lambda log_BTV: jnp.take_along_axis(log_BTV, num_taken_B[:, None, None], axis=1)[:, 0]
  log_p_BV, log_q_BV = at(log_p_BTV), at(log_q_BTV)
  left_BV = jnp.maximum(jnp.exp(log_p_BV) - jnp.exp(log_q_BV), 0)
  # Of equal distributions nothing is left but rounding, by which a draft may still not be taken.
  has_left_B1 = jnp.any(left_BV > 0, axis=-1, keepdims=True)
  is_whole_B1 = (num_taken_B == num_drafts)[:, None] | ~has_left_B1
  token_B = draw(
    keys_at(key_B, first_B + num_taken_B), jnp.where(is_whole_B1, log_p_BV, jnp.log(left_BV))
  )
  return num_taken_B, token_B


def _own_keys(key_B: jax.Array, purpose: np.uint32) -> jax.Array:
  return jax.vmap(jax.random.fold_in, (0, None))(key_B, purpose)
