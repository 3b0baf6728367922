"""The next token's distribution, rule by rule, and draws from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.inference.sampling import RowRules, Rules, draw, log_probs

VOCAB = 12
LOGITS_V = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 2
ORDER = np.argsort(-LOGITS_V)
PROB_V = np.exp(LOGITS_V) / np.exp(LOGITS_V).sum()
_log_probs = jax.jit(log_probs)


def probs(*rules, seen=()):
  """Of each rule a row, its distribution over LOGITS_V."""
  seen_BV = np.zeros((len(rules), VOCAB), bool)
  seen_BV[:, list(seen)] = True
  logits_BV = np.tile(LOGITS_V, (len(rules), 1))
  return np.exp(np.asarray(_log_probs(logits_BV, seen_BV, RowRules.of(rules))))


def only(kept):
  """PROB_V of `kept` tokens alone."""
  prob_V = np.where(np.isin(np.arange(VOCAB), kept), PROB_V, 0)
  return prob_V / prob_V.sum()


def fewest(share, order=ORDER, prob_V=PROB_V):
  return order[: np.searchsorted(np.cumsum(prob_V[order]), share) + 1]


def test_each_rule_cuts_what_it_says_and_rows_do_not_share_theirs():
  rules = {
    Rules(): only(ORDER),
    Rules(top_k=3): only(ORDER[:3]),
    Rules(top_k=1): only(ORDER[:1]),
    Rules(top_p=0.6): only(fewest(0.6)),
    Rules(top_p=1e-6): only(ORDER[:1]),
    Rules(min_p=0.2): only(np.flatnonzero(PROB_V / PROB_V.max() >= 0.2)),
    Rules(min_p=1.0): only(ORDER[:1]),
    Rules(top_k=4, top_p=0.9): only(fewest(0.9, ORDER[:4], only(ORDER[:4]))),
    Rules(temperature=0.0, top_k=5): only(ORDER[:1]),
  }
  np.testing.assert_allclose(probs(*rules), list(rules.values()), atol=1e-6)


def test_the_temperature_is_a_power_and_comes_before_the_cuts():
  hot, cold = probs(Rules(temperature=2.0), Rules(temperature=0.5, top_p=0.6))
  np.testing.assert_allclose(hot, PROB_V**0.5 / np.sum(PROB_V**0.5), rtol=1e-5)
  squared_V = PROB_V**2 / np.sum(PROB_V**2)
  kept = fewest(0.6, prob_V=squared_V)
  np.testing.assert_array_equal(np.flatnonzero(cold), np.sort(kept))


def test_tokens_as_likely_as_the_last_one_kept_are_kept():
  logits_BV = np.array([[1.0, 3.0, 1.0, 0.0]], np.float32)
  log_prob_BV = _log_probs(logits_BV, np.zeros((1, 4), bool), RowRules.of([Rules(top_k=2)]))
  np.testing.assert_array_equal(np.isfinite(log_prob_BV), [[True, True, True, False]])


def test_a_penalty_makes_what_was_seen_less_likely_whatever_its_sign():
  seen = [int(ORDER[0]), int(ORDER[-1])]
  assert LOGITS_V[seen[0]] > 0 > LOGITS_V[seen[1]]
  plain, penalized = probs(Rules(), Rules(repetition_penalty=1.5), seen=seen)
  others = np.setdiff1d(np.arange(VOCAB), seen)
  ratio_V = penalized / plain
  np.testing.assert_allclose(ratio_V[others], ratio_V[others[0]], rtol=1e-5)
  assert (ratio_V[seen] < ratio_V[others[0]]).all()


def test_draws_follow_the_distribution_and_their_own_keys():
  log_prob_BV = jnp.tile(jnp.log(probs(Rules(temperature=0.7, top_p=0.9))), (20_000, 1))
  keys = jax.vmap(jax.random.key)(jnp.arange(len(log_prob_BV)))
  drawn = np.asarray(jax.jit(draw)(keys, log_prob_BV))
  share_V = np.bincount(drawn, minlength=VOCAB) / len(drawn)
  np.testing.assert_allclose(share_V, np.exp(log_prob_BV[0]), atol=4 * 0.5 / len(drawn) ** 0.5)
  # What a row draws is its key's alone.
  np.testing.assert_array_equal(draw(keys[7:9], log_prob_BV[:2]), drawn[7:9])


@pytest.mark.parametrize(
  "rule",
  [
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_k": -1},
    {"top_p": 0.0},
    {"top_p": 1.5},
    {"min_p": -0.1},
    {"repetition_penalty": 0.0},
  ],
)
def test_a_wrong_rule_is_named(rule):
  with pytest.raises(ValueError, match=f"{next(iter(rule))}=.* must be "):
    Rules(**rule)
