"""What members say together, how good and how sure it is, and how much they differ.

Pure functions of float32 arrays: Z members, T tokens (or examples), V classes, C bins of
confidence. A token of weight 0 (padding) counts nowhere. Nor does a member of weight 0, where
members have weights, be its numbers finite or not: so a diverged one is left out.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.config.errors import UserError
from maxlite.metrics.step_row import bits_per_byte

NUM_BINS = 15  # of confidence, as many as Guo et al. 2017 take


def combine_log_probs(log_prob_ZTV: jax.Array, weight_Z: jax.Array, how: str) -> jax.Array:
  """log_prob_TV of the members combined as `how`, a name of `COMBINATIONS`, says.

  Weights need not sum to 1.

  Raises:
    UserError: there is no such combination.
  """
  if how not in COMBINATIONS:
    raise UserError(f"no combination {how!r}; choose one of {', '.join(COMBINATIONS)}")
  return COMBINATIONS[how](log_prob_ZTV, weight_Z)


def mean_of_probabilities(log_prob_ZTV: jax.Array, weight_Z: jax.Array) -> jax.Array:
  """log_prob_TV of the weighted mean of probabilities.

  Source: Lakshminarayanan et al. 2017, Simple and scalable predictive uncertainty estimation using
  deep ensembles, section 2.4.
  """
  share_Z = weight_Z / jnp.sum(weight_Z)

  def add(sum_TV: jax.Array, member: tuple) -> tuple:
    share, log_prob_TV = member
    return jnp.where(share > 0, jnp.logaddexp(sum_TV, jnp.log(share) + log_prob_TV), sum_TV), None

  # Member by member: a logsumexp over the first axis takes XLA:CPU 300 times as long.
  nothing_TV = jnp.full_like(log_prob_ZTV[0], -jnp.inf)
  return jax.lax.scan(add, nothing_TV, (share_Z, log_prob_ZTV))[0]


def mean_of_logits(log_prob_ZTV: jax.Array, weight_Z: jax.Array) -> jax.Array:
  """log_prob_TV of the softmax of the weighted mean of logits, a geometric mean of probabilities.

  Log-probabilities serve as logits: they differ by a number per member and token, which the
  softmax takes away.

  Source: Heskes 1998, Selecting weighting factors in logarithmic opinion pools, section 2.
  """
  return jax.nn.log_softmax(_mean_over_members(log_prob_ZTV, weight_Z), axis=-1)


COMBINATIONS = {
  "probabilities": mean_of_probabilities,
  "logits": mean_of_logits,
}


def _mean_over_members(values_Z: jax.Array, weight_Z: jax.Array) -> jax.Array:
  share_Z = (weight_Z / jnp.sum(weight_Z)).reshape(-1, *[1] * (values_Z.ndim - 1))
  return jnp.sum(jnp.where(share_Z > 0, share_Z * values_Z, 0), axis=0)


def uniform_weights(num_members: int) -> jax.Array:
  """weight_Z, the same for every member, with sum 1."""
  return jnp.full(num_members, 1 / num_members, jnp.float32)


def loss_weights(nll_Z: jax.Array, temperature: float) -> jax.Array:
  """weight_Z that falls with a member's held-out loss `nll_Z` [nats per token], with sum 1.

  A member worse by `temperature` nats per token has 1/e of the weight. A temperature of 1 over the
  number of tokens is the rule of the source, which on a long text is the best member alone: it
  takes tokens for independent draws. A loss that is not finite gets no weight.

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

  Each of `num_rounds` rounds adds the member that makes the loss of the mean smallest; of all
  rounds the one with the smallest loss counts. So the first round is the best single member, and
  on these tokens the result is never worse. Only the target's log-probability is needed.

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
  """Sums over tokens of how good a prediction is, which add up over batches; see `finish`.

  `weight`; `nll` [nats]; `correct`, where the likeliest class is the target; `brier`, the squared
  distance of the probabilities to the target's one-hot vector, 0 to 2; and of every bin of
  confidence, the likeliest class's probability, `bin_weight`, `bin_confidence` and `bin_correct`.
  Add them up in Python or NumPy: float32 stops counting at 2**24 tokens.

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
  """Sums over tokens of how much the members differ, which add up over batches; see `finish`.

  Members are of equal weight here: leave out what diverged. `weight`; `disagreement`, the share of
  pairs of members whose likeliest classes differ; and `mutual_information` [nats] of class and
  member, the entropy of the mean of probabilities minus the mean of entropies. It is summed as the
  mean divergence of a member from the mean, which is the same number without the difference of two
  large ones.

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
  """Values times weights; padding is 0 even where its value is not finite."""
  return jnp.where(weight_T > 0, values_T * weight_T, 0)


def finish(sums: Mapping[str, Any], num_bytes: float) -> dict[str, float]:
  """Means per token of `score_sums`, of `disagreement_sums`, or of both merged.

  `nll` [nats per token], `bits_per_byte` where the text has bytes, `accuracy`, `brier`, `ece`: the
  expected calibration error, the mean distance of a bin's accuracy to its confidence;
  `disagreement`, `mutual_information` [nats per token].

  Source: Guo et al. 2017, On calibration of modern neural networks, eq. 3 (ECE).

  Raises:
    UserError: no token has a weight.
  """
  totals = {name: np.asarray(value, np.float64) for name, value in sums.items()}
  weight = totals["weight"]
  if not weight > 0:
    raise UserError("no held-out token to score: give more held-out data")
  means: dict[str, Any] = {}
  if "nll" in totals:
    means["nll"] = totals["nll"] / weight
    if num_bytes:
      means["bits_per_byte"] = bits_per_byte(float(totals["nll"]), num_bytes)
    means["accuracy"] = totals["correct"] / weight
    means["brier"] = totals["brier"] / weight
    gap_C = np.abs(totals["bin_correct"] - totals["bin_confidence"])
    means["ece"] = gap_C.sum() / weight
  for name in ("disagreement", "mutual_information"):
    if name in totals:
      means[name] = totals[name] / weight
  return {name: float(value) for name, value in means.items()}


@struct.dataclass
class Prediction:
  """What the members of an ensemble predict for one input."""

  mean: Any  # weighted mean over the members
  members: Any  # every member's own, with a leading axis Z
  disagreement: Any  # weighted standard deviation over the members, of the shape of the mean


def summarize(members: Any, weight_Z: jax.Array) -> Prediction:
  """The prediction of `members`, an array or a tree of arrays of any shape with a leading axis Z.

  Source: Lakshminarayanan et al. 2017, section 2.4 (members as a mixture of equal weights).
  """

  def deviation(values_Z):
    distance_Z = values_Z - _mean_over_members(values_Z, weight_Z)[None]
    return jnp.sqrt(_mean_over_members(jnp.square(distance_Z), weight_Z))

  mean = jax.tree.map(lambda values_Z: _mean_over_members(values_Z, weight_Z), members)
  return Prediction(mean, members, jax.tree.map(deviation, members))
