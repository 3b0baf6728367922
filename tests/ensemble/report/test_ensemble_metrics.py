"""Combined predictions and their scores: against float64 NumPy, by hand, and by properties."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.slow_cases import slow

from maxlite.ensemble.report import ensemble_metrics
from maxlite.ensemble.report.ensemble_metrics import (
  COMBINATIONS,
  NUM_BINS,
  loss_weights,
  mean_scores,
  uniform_weights,
)

combine_log_probs = jax.jit(
  lambda log_prob_ZTV, weight_Z, how: COMBINATIONS[how](log_prob_ZTV, weight_Z), static_argnums=2
)
greedy_weights = jax.jit(ensemble_metrics.greedy_weights, static_argnums=2)
score_sums = jax.jit(ensemble_metrics.score_sums)
disagreement_sums = jax.jit(ensemble_metrics.disagreement_sums)

Z = 4
T = 50
V = 7


def softmax64(logits):
  exp = np.exp(logits - logits.max(axis=-1, keepdims=True))
  return exp / exp.sum(axis=-1, keepdims=True)


@pytest.fixture
def members():
  """(log_prob_ZTV, target_T, weight_T) of members of different skill; a fifth is padding."""
  rng = np.random.default_rng(0)
  target_T = rng.integers(0, V, T)
  logits_ZTV = rng.normal(0, 2, (Z, T, V))
  logits_ZTV += np.arange(1, Z + 1)[:, None, None] * np.eye(V)[target_T]
  weight_T = (np.arange(T) % 5 > 0).astype(np.float32)
  log_prob_ZTV = np.log(softmax64(logits_ZTV)).astype(np.float32)
  return log_prob_ZTV, target_T.astype(np.int32), weight_T


def targets(log_prob_ZTV, target_T):
  return log_prob_ZTV[:, np.arange(T), target_T]


def score(log_prob_TV, target_T, weight_T):
  return mean_scores(score_sums(log_prob_TV, target_T, weight_T), num_bytes=0)


def with_nan(values, where):
  with_nans = values.copy()
  with_nans[where] = np.nan
  return with_nans


@pytest.mark.parametrize("how", COMBINATIONS)
def test_combinations_agree_with_float64(members, how):
  log_prob = np.asarray(members[0], np.float64)
  weight_Z = np.array([0.5, 2, 0, 1.5])
  share = (weight_Z / weight_Z.sum())[:, None, None]
  expected = {
    "probabilities": (share * np.exp(log_prob)).sum(axis=0),
    "logits": softmax64((share * (log_prob + 3)).sum(axis=0)),
  }[how]
  found = combine_log_probs(members[0], np.float32(weight_Z), how)
  np.testing.assert_allclose(found, np.log(expected), atol=3e-6)


@pytest.mark.parametrize("how", COMBINATIONS)
def test_probabilities_too_small_for_float32_keep_their_ratio(how):
  log_prob_ZTV = np.float32([[[0, -300, -400]], [[0, -300, -402]]])
  found = combine_log_probs(log_prob_ZTV, uniform_weights(2), how)
  last = {"probabilities": -400 + np.log((1 + np.exp(-2)) / 2), "logits": -401}[how]
  np.testing.assert_allclose(found, [[0, -300, last]], rtol=1e-6)


@pytest.mark.parametrize("how", COMBINATIONS)
def test_a_diverged_member_without_weight_changes_nothing(members, how):
  weight_Z = np.float32([1, 0, 2, 1])
  found = combine_log_probs(with_nan(members[0], 1), weight_Z, how)
  np.testing.assert_array_equal(found, combine_log_probs(members[0], weight_Z, how))


def test_loss_weights_fall_by_e_per_temperature():
  weight_Z = loss_weights(np.asarray([2.0, 2.1, np.nan, 2.3, np.inf]), temperature=0.1)
  assert weight_Z.sum() == pytest.approx(1)
  np.testing.assert_allclose(weight_Z / weight_Z[0], np.exp([0, -1, -np.inf, -3, -np.inf]), 1e-5)
  with pytest.raises(ValueError, match=r"temperature=0 .* above 0"):
    loss_weights(np.ones(2), temperature=0)


def greedy64(prob_ZT, weight_T, num_rounds):
  """Greedy selection as in the paper: lists of members and the loss of their mean probability."""

  def loss(chosen):
    return -np.sum(weight_T * np.log(np.mean(prob_ZT[chosen], axis=0)))

  chosen = []
  path = []
  for _ in range(num_rounds):
    chosen = min(([*chosen, z] for z in range(len(prob_ZT))), key=loss)
    path.append(chosen)
  best = min(path, key=loss)
  return np.bincount(best, minlength=len(prob_ZT)) / len(best)


@pytest.mark.parametrize("num_rounds", [slow(1), 2, slow(5), 20])
def test_greedy_selection_agrees_with_float64(members, num_rounds):
  log_prob_ZTV, target_T, weight_T = members
  log_prob_ZT = targets(log_prob_ZTV, target_T)
  found = greedy_weights(log_prob_ZT, weight_T, num_rounds)
  expected = greedy64(np.exp(np.asarray(log_prob_ZT, np.float64)), np.asarray(weight_T), num_rounds)
  np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_greedy_is_never_worse_than_the_best_single_member(seed):
  # The second round adds a worse member or the best one again, so it may be worse than the first.
  log_prob_ZT = -np.float32(np.random.default_rng(seed).exponential(1, (3, 6)))
  weight_Z = greedy_weights(log_prob_ZT, np.ones(6), num_rounds=7)
  mean_T = jax.nn.logsumexp(log_prob_ZT, axis=0, b=weight_Z[:, None])
  assert weight_Z.sum() == pytest.approx(1)
  assert mean_T.sum() >= log_prob_ZT.sum(axis=-1).max() - 1e-5


def test_greedy_returns_the_best_round_not_the_last():
  # The mean of both members is best; a third choice makes it worse.
  log_prob_ZT = np.log(np.float32([[0.9, 0.1], [0.1, 0.9]]))
  for num_rounds in (2, 3, 5):
    np.testing.assert_allclose(greedy_weights(log_prob_ZT, np.ones(2), num_rounds), [0.5, 0.5])


def test_greedy_distinguishes_targets_too_unlikely_for_float32():
  log_prob_ZT = np.float32([[-201, -150], [-200, -150]])
  np.testing.assert_array_equal(greedy_weights(log_prob_ZT, np.ones(2), num_rounds=3), [0, 1])


def test_greedy_ignores_padding_and_diverged_members(members):
  log_prob_ZTV, target_T, weight_T = members
  log_prob_ZT = targets(log_prob_ZTV, target_T)
  without = greedy_weights(log_prob_ZT[:3], weight_T, 8)
  with_nans = with_nan(with_nan(log_prob_ZT, 3), (slice(None), weight_T == 0))
  np.testing.assert_array_equal(greedy_weights(with_nans, weight_T, 8), [*without, 0])


def test_scores_agree_with_float64(members):
  log_prob_TV = members[0][0]
  target_T = members[1]
  weight_T = members[2]
  found = mean_scores(score_sums(log_prob_TV, target_T, weight_T), num_bytes=60)
  kept = np.asarray(weight_T) > 0
  prob = np.exp(np.asarray(log_prob_TV, np.float64))[kept]
  target = np.asarray(target_T)[kept]
  confidence = prob.max(axis=-1)
  correct = prob.argmax(axis=-1) == target
  nll = -np.log(prob[np.arange(len(target)), target])
  ece = 0.0
  for low in np.arange(NUM_BINS) / NUM_BINS:
    inside = (confidence > low) & (confidence <= low + 1 / NUM_BINS)
    if inside.any():
      gap = correct[inside].mean() - confidence[inside].mean()
      ece += inside.mean() * abs(gap)
  one_hot = np.eye(V)[target]
  squared_distance = np.square(prob - one_hot).sum(axis=-1)
  expected = {
    "nll": nll.mean(),
    "bits_per_byte": nll.sum() / np.log(2) / 60,
    "accuracy": correct.mean(),
    "brier": squared_distance.mean(),
    "ece": ece,
  }
  assert found == pytest.approx(expected, rel=1e-5)


def test_scores_by_hand():
  # Certain and right; certain and wrong; a tie, of which argmax takes the first, which is right.
  log_prob_TV = jnp.log(np.float32([[1, 0], [1, 0], [0.5, 0.5]]))
  sums = score_sums(log_prob_TV, np.asarray([0, 1, 0]), np.ones(3))
  assert sums["nll"] == np.inf
  assert sums["correct"] == 2
  assert sums["brier"] == 0 + 2 + 0.5
  assert {b: float(n) for b, n in enumerate(sums["bin_weight"]) if n} == {7: 1, 14: 2}
  found = mean_scores(sums, num_bytes=0)
  assert found["ece"] == pytest.approx((abs(1 - 2) + abs(1 - 0.5)) / 3)
  assert "bits_per_byte" not in found


def test_true_probabilities_are_calibrated():
  rng = np.random.default_rng(1)
  prob_TV = rng.dirichlet(np.ones(3), 20_000)
  drawn_T = rng.random(20_000)
  is_above_TV = drawn_T[:, None] > prob_TV.cumsum(axis=-1)
  target_T = np.int32(is_above_TV.sum(axis=-1))
  weight_T = np.ones(20_000)
  log_prob_TV = np.float32(np.log(prob_TV))
  sharper_TV = jax.nn.log_softmax(3 * log_prob_TV, axis=-1)
  assert score(log_prob_TV, target_T, weight_T)["ece"] < 0.015
  assert score(sharper_TV, target_T, weight_T)["ece"] > 0.1


def test_disagreement_agrees_with_float64(members):
  log_prob_ZTV, _, weight_T = members
  kept = np.asarray(weight_T) > 0
  prob = np.exp(np.asarray(log_prob_ZTV, np.float64))[:, kept]

  def entropy(p):
    return -(p * np.log(p)).sum(axis=-1)

  votes = prob.argmax(axis=-1)
  pairs = []
  for i, j in itertools.combinations(range(Z), 2):
    pairs.append((votes[i] != votes[j]).mean())
  information = entropy(prob.mean(axis=0)) - entropy(prob).mean(axis=0)
  found = mean_scores(disagreement_sums(log_prob_ZTV, weight_T), num_bytes=0)
  expected = {"disagreement": np.mean(pairs), "mutual_information": information.mean()}
  assert found == pytest.approx(expected, rel=1e-5)


def test_opposite_members_disagree_by_one_bit():
  certain = jnp.log(np.float32([[[1, 0]], [[0, 1]]]))
  found = mean_scores(disagreement_sums(certain, np.ones(1)), num_bytes=0)
  assert found == pytest.approx({"disagreement": 1, "mutual_information": np.log(2)})


@pytest.mark.parametrize("how", COMBINATIONS)
def test_identical_members_are_as_good_as_one(members, how):
  log_prob_ZTV, target_T, weight_T = members
  same_ZTV = np.repeat(log_prob_ZTV[:1], 3, axis=0)
  combined_TV = combine_log_probs(same_ZTV, np.asarray([1.0, 5, 2]), how)
  one = score(log_prob_ZTV[0], target_T, weight_T)
  assert score(combined_TV, target_T, weight_T) == pytest.approx(one, rel=1e-5)
  apart = mean_scores(disagreement_sums(same_ZTV, weight_T), num_bytes=0)
  assert apart == pytest.approx({"disagreement": 0, "mutual_information": 0}, abs=1e-6)
  alone = mean_scores(disagreement_sums(same_ZTV[:1], weight_T), num_bytes=0)
  assert alone == pytest.approx({"disagreement": 0, "mutual_information": 0}, abs=1e-6)


@pytest.mark.parametrize("how", COMBINATIONS)
def test_a_combination_is_never_worse_than_the_mean_loss_of_members(members, how):
  """By Jensen for probabilities; for logits as the partition function is convex."""
  log_prob_ZTV, target_T, weight_T = members
  weight_Z = np.asarray([0.1, 0.2, 0.3, 0.4])
  member_nll = [score(log_prob_TV, target_T, weight_T)["nll"] for log_prob_TV in log_prob_ZTV]
  combined_TV = combine_log_probs(log_prob_ZTV, weight_Z, how)
  assert score(combined_TV, target_T, weight_T)["nll"] < np.dot(weight_Z, member_nll)


@pytest.mark.parametrize("name", ["score_sums", "disagreement_sums"])
def test_sums_add_up_over_batches_and_padding_counts_nowhere(members, name):
  log_prob_ZTV, target_T, weight_T = members
  sums_of = {
    "score_sums": lambda log_prob, part: score_sums(log_prob[0], target_T[part], weight_T[part]),
    "disagreement_sums": lambda log_prob, part: disagreement_sums(log_prob, weight_T[part]),
  }[name]
  padded_ZTV = with_nan(log_prob_ZTV, (slice(None), weight_T == 0))
  whole = sums_of(log_prob_ZTV, slice(None))
  parts = [sums_of(padded_ZTV[:, p], p) for p in (slice(0, 25), slice(25, T))]
  added = functools.reduce(functools.partial(jax.tree.map, np.add), parts)
  assert whole["weight"] == 40
  for key, value in whole.items():
    np.testing.assert_allclose(added[key], value, rtol=1e-5, err_msg=key)


def test_scores_without_tokens_are_rejected(members):
  with pytest.raises(ValueError, match="give more held-out data"):
    score(members[0][0], members[1], np.zeros(T))
