"""Combined predictions of the members, their scores and calibration, and the members' disagreement.

`score_combinations` scores them on held-out text. The others are pure functions of float32 arrays:
Z members, T tokens (or examples), V classes, C confidence bins. Tokens of weight 0 (padding) are
ignored, and so are members of weight 0 (such as diverged ones), even if their values are not
finite.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.errors import UserError
from maxlite.data.batch import Batch
from maxlite.metrics.step_row import bits_per_byte

NUM_BINS = 15  # of confidence, as in Guo et al. 2017
LOSS_TEMPERATURE = 0.1  # [nats per token] a member worse by this has 1/e of the weight
GREEDY_ROUNDS = 50


def mean_of_probabilities(log_prob_ZTV: jax.Array, weight_Z: jax.Array) -> jax.Array:
  """log_prob_TV of the weighted mean of probabilities.

  Source: Lakshminarayanan et al. 2017, Simple and scalable predictive uncertainty estimation using
  deep ensembles, section 2.4.
  """
  share_Z = weight_Z / jnp.sum(weight_Z)

  def add(sum_TV: jax.Array, member: tuple) -> tuple:
    share, log_prob_TV = member
    return jnp.where(share > 0, jnp.logaddexp(sum_TV, jnp.log(share) + log_prob_TV), sum_TV), None

  # A scan over members: on XLA:CPU, a logsumexp over the first axis takes 300 times as long.
  zero_TV = jnp.full_like(log_prob_ZTV[0], -jnp.inf)
  return jax.lax.scan(add, zero_TV, (share_Z, log_prob_ZTV))[0]


def mean_of_logits(log_prob_ZTV: jax.Array, weight_Z: jax.Array) -> jax.Array:
  """log_prob_TV of the softmax of the weighted mean of logits, a geometric mean of probabilities.

  Log-probabilities replace logits: they differ by a constant per member and token, which cancels in
  the softmax.

  Source: Heskes 1998, Selecting weighting factors in logarithmic opinion pools, section 2.
  """
  share_Z = (weight_Z / jnp.sum(weight_Z))[:, None, None]
  mean_TV = jnp.sum(jnp.where(share_Z > 0, share_Z * log_prob_ZTV, 0), axis=0)
  return jax.nn.log_softmax(mean_TV, axis=-1)


# (log_prob_ZTV, weight_Z) -> log_prob_TV; the weights need not sum to 1.
COMBINATIONS = {"probabilities": mean_of_probabilities, "logits": mean_of_logits}


def uniform_weights(num_members: int) -> jax.Array:
  """Equal weight_Z with sum 1."""
  return jnp.full(num_members, 1 / num_members, jnp.float32)


def loss_weights(nll_Z: jax.Array, temperature: float) -> jax.Array:
  """weight_Z that decreases with the held-out loss `nll_Z` [nats per token], with sum 1.

  A member worse by `temperature` nats per token has 1/e of the weight; a loss that is not finite
  has weight 0. The source's temperature is 1 / number of tokens, as if tokens were independent; on
  a long text it selects the best member.

  Source: Yao et al. 2018, Using stacking to average Bayesian predictive distributions, section 3.4
  (pseudo-BMA).

  Raises:
    UserError: the temperature is not positive.
  """
  if not temperature > 0:
    raise UserError(f"temperature={temperature} of the members' weights must be above 0")
  return jax.nn.softmax(jnp.where(jnp.isfinite(nll_Z), -nll_Z / temperature, -jnp.inf))


def greedy_weights(
  target_log_prob_ZT: jax.Array, weight_T: jax.Array, num_rounds: int
) -> jax.Array:
  """weight_Z of greedy selection with replacement for the mean of probabilities, with sum 1.

  Each of `num_rounds` rounds adds the member that minimizes the loss of the mean; the round with
  the smallest loss is returned. The first round selects the best single member, so on these tokens
  the result is never worse. Only the targets' log-probabilities are needed.

  Source: Caruana et al. 2004, Ensemble selection from libraries of models, sections 2 and 2.1.
  """
  share_T = weight_T / jnp.sum(weight_T)

  def add_one(log_sum_T, size):
    log_sum_ZT = jnp.logaddexp(log_sum_T[None], target_log_prob_ZT)
    nll_ZT = jnp.where(share_T > 0, jnp.log(size) - log_sum_ZT, 0)
    nll_Z = jnp.sum(share_T[None] * nll_ZT, axis=-1)
    nll_Z = jnp.where(jnp.isnan(nll_Z), jnp.inf, nll_Z)
    chosen = jnp.argmin(nll_Z)
    return log_sum_ZT[chosen], (chosen, nll_Z[chosen])

  empty_T = jnp.full_like(share_T, -jnp.inf)
  sizes = jnp.arange(1, num_rounds + 1, dtype=jnp.float32)
  _, (chosen, nll) = jax.lax.scan(add_one, empty_T, sizes)
  best = jnp.argmin(nll)
  counted = (jnp.arange(num_rounds) <= best).astype(jnp.float32)
  return jnp.bincount(chosen, counted, length=len(target_log_prob_ZT)) / sizes[best]


def score_sums(
  log_prob_TV: jax.Array, target_T: jax.Array, weight_T: jax.Array
) -> dict[str, jax.Array]:
  """Sums over tokens of a prediction's scores, which add up over batches; see `mean_scores`.

  `weight`; `nll` [nats]; `correct`, whether the argmax is the target; `brier`, the squared distance
  of the probabilities from the target's one-hot vector, 0 to 2; and for every bin of confidence,
  the largest probability, `bin_weight`, `bin_confidence` and `bin_correct`. Add them up in Python
  or NumPy: float32 cannot count beyond 2**24 tokens.

  Source: Brier 1950, Verification of forecasts expressed in terms of probability (score P);
  Guo et al. 2017, On calibration of modern neural networks, section 2 (bins).
  """
  prob_TV = jnp.exp(log_prob_TV)
  is_target_TV = jax.nn.one_hot(target_T, log_prob_TV.shape[-1], dtype=jnp.float32)
  log_prob_T = jnp.take_along_axis(log_prob_TV, target_T[:, None], axis=-1)[:, 0]
  correct_T = (jnp.argmax(log_prob_TV, axis=-1) == target_T).astype(jnp.float32)
  confidence_T = jnp.max(prob_TV, axis=-1)
  bin_T = jnp.clip(jnp.ceil(confidence_T * NUM_BINS) - 1, 0, NUM_BINS - 1).astype(jnp.int32)
  total = lambda values_T: jnp.sum(_weighted(values_T, weight_T))
  per_bin = lambda values_T: jnp.bincount(bin_T, _weighted(values_T, weight_T), length=NUM_BINS)
  return {
    "weight": jnp.sum(weight_T),
    "nll": total(-log_prob_T),
    "correct": total(correct_T),
    "brier": total(jnp.sum(jnp.square(prob_TV - is_target_TV), axis=-1)),
    "bin_weight": per_bin(jnp.ones_like(confidence_T)),
    "bin_confidence": per_bin(confidence_T),
    "bin_correct": per_bin(correct_T),
  }


def disagreement_sums(log_prob_ZTV: jax.Array, weight_T: jax.Array) -> dict[str, jax.Array]:
  """Sums over tokens of the members' disagreement, which add up over batches; see `mean_scores`.

  Members have equal weight: omit diverged ones. `weight`; `disagreement`, the share of pairs of
  members whose argmax differs; and `mutual_information` [nats] of class and member, the entropy of
  the mean of probabilities minus the mean of entropies. It is computed as the mean divergence of a
  member from the mean, which avoids the difference of two large numbers.

  Source: Fort et al. 2019, Deep ensembles: a loss landscape perspective (disagreement);
  Houlsby et al. 2011, Bayesian active learning for classification and preference learning, eq. 2.
  """
  num_members = len(log_prob_ZTV)
  vote_ZT = jnp.argmax(log_prob_ZTV, axis=-1)
  num_differ_T = jnp.sum(vote_ZT[:, None] != vote_ZT[None], axis=(0, 1)).astype(jnp.float32)
  mean_TV = mean_of_probabilities(log_prob_ZTV, uniform_weights(num_members))
  prob_ZTV = jnp.exp(log_prob_ZTV)
  divergence_ZTV = jnp.where(prob_ZTV > 0, prob_ZTV * (log_prob_ZTV - mean_TV[None]), 0)
  information_T = jnp.sum(jnp.mean(divergence_ZTV, axis=0), axis=-1)
  disagreement_T = num_differ_T / max(num_members * (num_members - 1), 1)
  return {
    "weight": jnp.sum(weight_T),
    "disagreement": jnp.sum(_weighted(disagreement_T, weight_T)),
    "mutual_information": jnp.sum(_weighted(information_T, weight_T)),
  }


def _weighted(values_T: jax.Array, weight_T: jax.Array) -> jax.Array:
  """Values times weights; 0 for padding, even if its value is not finite."""
  return jnp.where(weight_T > 0, values_T * weight_T, 0)


def mean_scores(sums: Mapping[str, Any], num_bytes: float) -> dict[str, float]:
  """Means per token of `score_sums`, of `disagreement_sums`, or of both merged.

  `nll` [nats per token], `bits_per_byte` if the text has bytes, `accuracy`, `brier`, `ece`: the
  expected calibration error, the mean distance between a bin's accuracy and its confidence;
  `disagreement`, `mutual_information` [nats per token].

  Source: Guo et al. 2017, On calibration of modern neural networks, eq. 3 (ECE).

  Raises:
    UserError: no token has a weight.
  """
  totals = {name: np.asarray(value, np.float64) for name, value in sums.items()}
  if not totals["weight"] > 0:
    raise UserError("no held-out token to score: give more held-out data")
  if "nll" in totals:
    totals["accuracy"] = totals["correct"]
    totals["ece"] = np.abs(totals["bin_correct"] - totals["bin_confidence"]).sum()
  names = ("nll", "accuracy", "brier", "ece", "disagreement", "mutual_information")
  means = {name: float(totals[name] / totals["weight"]) for name in names if name in totals}
  if "nll" in totals and num_bytes:
    means["bits_per_byte"] = bits_per_byte(float(totals["nll"]), num_bytes)
  return means


def score_combinations(
  predict: Callable[[Batch], list[jax.Array]],
  batches: Callable[[], Iterator[Batch]],
  num_bytes_V: np.ndarray,
) -> dict[str, dict[str, Any]]:
  """{combination: its sums and `mean_scores`}, the best single member first.

  Weights are chosen on every other batch from the first on, and scored on the rest. With a single
  batch, combinations that need a choice are left out.

  Args:
    predict: per member, log-probabilities [B, T, V] of a batch's targets.
    batches: iterates over the same batches on every call.
  """
  is_single = sum(1 for _ in batches()) < 2
  step = 1 if is_single else 2
  weights = _choose_weights(predict, itertools.islice(batches(), 0, None, step), is_single)
  totals: dict[str, dict] = {}
  num_bytes = 0.0
  for batch in itertools.islice(batches(), step - 1, None, step):
    log_prob_ZTV, target_T, weight_T = _flatten_rows(predict(batch), batch)
    counted_BT = np.asarray(batch.weight_BT) > 0
    num_bytes += float(np.sum(num_bytes_V[np.asarray(batch.targets_BT)][counted_BT]))
    for name, (how, weight_Z) in weights.items():
      _add(totals, name, _score(how, log_prob_ZTV, weight_Z, target_T, weight_T))
    _add(totals, "disagreement", _disagreement(log_prob_ZTV, weight_T))
  disagreement = mean_scores(totals.pop("disagreement"), 0.0)
  return {name: sums | mean_scores(sums, num_bytes) | disagreement for name, sums in totals.items()}


def _choose_weights(
  predict: Callable, batches: Iterator[Batch], is_single: bool
) -> dict[str, tuple[str, jax.Array]]:
  """{name: (how to combine, weight_Z)}"""
  target_ZT, weight_T = [], []
  for batch in batches:
    log_prob_ZTV, target, weight = _flatten_rows(predict(batch), batch)
    target_ZT.append(_target_log_probs(log_prob_ZTV, target))
    weight_T.append(weight)
  target_ZT, weight_T = jnp.concatenate(target_ZT, axis=1), jnp.concatenate(weight_T)
  nll_Z = -jnp.sum(target_ZT * weight_T[None], axis=1) / jnp.sum(weight_T)
  equal_Z = uniform_weights(target_ZT.shape[0])
  best_Z = jax.nn.one_hot(jnp.nanargmin(nll_Z), target_ZT.shape[0])
  weights = {
    "best member": ("probabilities", best_Z),
    "mean of probabilities": ("probabilities", equal_Z),
    "mean of logits": ("logits", equal_Z),
  }
  if not is_single:
    weights["weighted by held-out loss"] = ("probabilities", loss_weights(nll_Z, LOSS_TEMPERATURE))
    chosen_Z = greedy_weights(target_ZT, weight_T, GREEDY_ROUNDS)
    weights["greedy selection"] = ("probabilities", chosen_Z)
  return weights


def _flatten_rows(
  log_prob: Sequence[jax.Array], batch: Batch
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(log_prob_ZTV, target_T, weight_T) with all rows concatenated, on one device."""
  # It waits: simulated devices that gather several batches at the same time deadlock.
  stacked = np.stack([own.reshape(-1, own.shape[-1]) for own in jax.device_get(log_prob)])
  return jnp.asarray(stacked), jnp.ravel(batch.targets_BT), jnp.ravel(batch.weight_BT)


@jax.jit
def _target_log_probs(log_prob_ZTV: jax.Array, target_T: jax.Array) -> jax.Array:
  return jnp.take_along_axis(log_prob_ZTV, target_T[None, :, None], axis=2)[..., 0]


@functools.partial(jax.jit, static_argnums=0)
def _score(how, log_prob_ZTV, weight_Z, target_T, weight_T) -> dict:
  return score_sums(COMBINATIONS[how](log_prob_ZTV, weight_Z), target_T, weight_T)


_disagreement = jax.jit(disagreement_sums)


def _add(totals: dict[str, dict], name: str, sums: dict) -> None:
  """Add in float64 on the host: float32 cannot count beyond 2**24 tokens."""
  exact = {key: np.asarray(value, np.float64) for key, value in jax.device_get(sums).items()}
  before = totals.get(name)
  totals[name] = exact if before is None else {key: before[key] + exact[key] for key in exact}
