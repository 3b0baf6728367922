"""The distribution of the next token for each sampling parameter, and samples from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.inference.sampling import BatchSamplingParams, SamplingParams, log_probs, sample

VOCAB = 12
LOGITS_V = np.random.default_rng(0).normal(size=VOCAB).astype(np.float32) * 2
ORDER = np.argsort(-LOGITS_V)
PROB_V = np.exp(LOGITS_V) / np.exp(LOGITS_V).sum()
_log_probs = jax.jit(log_probs)


def probs(*params, seen=()):
  """Distributions for LOGITS_V, a row per SamplingParams."""
  seen_BV = np.zeros((len(params), VOCAB), bool)
  seen_BV[:, list(seen)] = True
  logits_BV = np.tile(LOGITS_V, (len(params), 1))
  return np.exp(np.asarray(_log_probs(logits_BV, seen_BV, BatchSamplingParams.stack(params))))


def only(kept):
  """PROB_V restricted to the tokens `kept`."""
  prob_V = np.where(np.isin(np.arange(VOCAB), kept), PROB_V, 0)
  return prob_V / prob_V.sum()


def nucleus(share, order=ORDER, prob_V=PROB_V):
  return order[: np.searchsorted(np.cumsum(prob_V[order]), share) + 1]


def test_each_parameter_applies_to_its_own_row():
  expected = {
    SamplingParams(): only(ORDER),
    SamplingParams(top_k=3): only(ORDER[:3]),
    SamplingParams(top_k=1): only(ORDER[:1]),
    SamplingParams(top_p=0.6): only(nucleus(0.6)),
    SamplingParams(top_p=1e-6): only(ORDER[:1]),
    SamplingParams(min_p=0.2): only(np.flatnonzero(PROB_V / PROB_V.max() >= 0.2)),
    SamplingParams(min_p=1.0): only(ORDER[:1]),
    SamplingParams(top_k=4, top_p=0.9): only(nucleus(0.9, ORDER[:4], only(ORDER[:4]))),
    SamplingParams(temperature=0.0, top_k=5): only(ORDER[:1]),
  }
  np.testing.assert_allclose(probs(*expected), list(expected.values()), atol=1e-6)


def test_logits_divided_by_a_tiny_temperature_do_not_overflow():
  params = BatchSamplingParams.stack([SamplingParams(temperature=1e-37)])
  log_prob_BV = log_probs(jnp.array([[30.0, 40.0, 10.0]]), jnp.zeros((1, 3), bool), params)
  np.testing.assert_array_equal(log_prob_BV, [[-np.inf, 0, -np.inf]])


def test_the_temperature_is_a_power_and_is_applied_before_top_p():
  hot, cold = probs(SamplingParams(temperature=2.0), SamplingParams(temperature=0.5, top_p=0.6))
  np.testing.assert_allclose(hot, PROB_V**0.5 / np.sum(PROB_V**0.5), rtol=1e-5)
  squared_V = PROB_V**2 / np.sum(PROB_V**2)
  kept = nucleus(0.6, prob_V=squared_V)
  np.testing.assert_array_equal(np.flatnonzero(cold), np.sort(kept))


def test_ties_with_the_last_token_kept_are_kept():
  logits_BV = np.array([[1.0, 3.0, 1.0, 0.0]], np.float32)
  log_prob_BV = _log_probs(
    logits_BV, np.zeros((1, 4), bool), BatchSamplingParams.stack([SamplingParams(top_k=2)])
  )
  np.testing.assert_array_equal(np.isfinite(log_prob_BV), [[True, True, True, False]])


def test_the_repetition_penalty_applies_to_logits_of_either_sign():
  seen = [int(ORDER[0]), int(ORDER[-1])]
  assert LOGITS_V[seen[0]] > 0 > LOGITS_V[seen[1]]
  plain, penalized = probs(SamplingParams(), SamplingParams(repetition_penalty=1.5), seen=seen)
  others = np.setdiff1d(np.arange(VOCAB), seen)
  ratio_V = penalized / plain
  np.testing.assert_allclose(ratio_V[others], ratio_V[others[0]], rtol=1e-5)
  assert (ratio_V[seen] < ratio_V[others[0]]).all()


def test_samples_follow_the_distribution_and_their_keys():
  num_samples = 20_000
  prob_1V = probs(SamplingParams(temperature=0.7, top_p=0.9))
  log_prob_BV = jnp.tile(jnp.log(prob_1V), (num_samples, 1))
  key_B = jax.vmap(jax.random.key)(jnp.arange(num_samples))
  sampled_B = np.asarray(jax.jit(sample)(key_B, log_prob_BV))
  share_V = np.bincount(sampled_B, minlength=VOCAB) / num_samples
  largest_deviation = 0.5 / num_samples**0.5  # the standard deviation of a share of one half
  np.testing.assert_allclose(share_V, prob_1V[0], atol=4 * largest_deviation)
  # A row's sample depends only on its key.
  np.testing.assert_array_equal(sample(key_B[7:9], log_prob_BV[:2]), sampled_B[7:9])


@pytest.mark.parametrize(
  "param",
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
def test_a_parameter_out_of_range_raises(param):
  with pytest.raises(ValueError, match=f"{next(iter(param))}=.* must be "):
    SamplingParams(**param)
