"""Combined predictions of the members, their scores and calibration, and the members' disagreement.

`score_combinations` scores them on held-out text. The others are pure functions of float32 arrays:
Z members, T tokens (or examples), V classes, C confidence bins. Tokens of weight 0 (padding) are
ignored, and so are members of weight 0 (such as diverged ones), even if their values are not
finite.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from maxlite.data.batch import Batch
from maxlite.errors import UserError
from maxlite.metrics.step_row import bits_per_byte
from maxlite.storage.json_values import JsonObject

NUM_BINS = 15  # bins of confidence, as in Guo et al. 2017
LOSS_TEMPERATURE = 0.1  # [nats per token] a member worse by this has 1/e of the weight
GREEDY_ROUNDS = 50  # rounds of greedy selection, each of which adds a member


def mean_of_probabilities(log_prob_ZTV: jax.Array, weight_Z: jax.Array) -> jax.Array:
  """log_prob_TV of the weighted mean of probabilities.

  Source: Lakshminarayanan et al. 2017, Simple and scalable predictive uncertainty estimation using
  deep ensembles, section 2.4.
  """
  share_Z = weight_Z / jnp.sum(weight_Z)

  def add(
    sum_TV: jax.Array,
    member: tuple[jax.Array, jax.Array],
  ) -> tuple[jax.Array, None]:
    share, log_prob_TV = member
    own_TV = jnp.log(share) + log_prob_TV
    with_member_TV = jnp.logaddexp(sum_TV, own_TV)
    return jnp.where(share > 0, with_member_TV, sum_TV), None

  # A scan over members: on XLA:CPU, a logsumexp over the first axis takes 300 times as long.
  zero_TV = jnp.full_like(log_prob_ZTV[0], -jnp.inf)
  sum_TV, _ = jax.lax.scan(add, zero_TV, (share_Z, log_prob_ZTV))
  return sum_TV


def mean_of_logits(log_prob_ZTV: jax.Array, weight_Z: jax.Array) -> jax.Array:
  """log_prob_TV of the softmax of the weighted mean of logits, a geometric mean of probabilities.

  Log-probabilities replace logits: they differ by a constant per member and token, which cancels in
  the softmax.

  Source: Heskes 1998, Selecting weighting factors in logarithmic opinion pools, section 2.
  """
  share_Z = weight_Z / jnp.sum(weight_Z)
  share_Z11 = share_Z[:, None, None]
  weighted_ZTV = jnp.where(share_Z11 > 0, share_Z11 * log_prob_ZTV, 0)
  mean_TV = jnp.sum(weighted_ZTV, axis=0)
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
  is_finite_Z = jnp.isfinite(nll_Z)
  logit_Z = -nll_Z / temperature
  logit_Z = jnp.where(is_finite_Z, logit_Z, -jnp.inf)
  return jax.nn.softmax(logit_Z)


def greedy_weights(
  target_log_prob_ZT: jax.Array,
  weight_T: jax.Array,
  num_rounds: int,
) -> jax.Array:
  """weight_Z of greedy selection with replacement for the mean of probabilities, with sum 1.

  Each of `num_rounds` rounds adds the member that minimizes the loss of the mean; the round with
  the smallest loss is returned. The first round selects the best single member, so on these tokens
  the result is never worse. Only the targets' log-probabilities are needed.

  Source: Caruana et al. 2004, Ensemble selection from libraries of models, sections 2 and 2.1.
  """
  share_T = weight_T / jnp.sum(weight_T)

  def add_one(
    log_sum_T: jax.Array,
    size: jax.Array,
  ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    log_sum_ZT = jnp.logaddexp(log_sum_T[None], target_log_prob_ZT)
    nll_ZT = jnp.log(size) - log_sum_ZT
    nll_ZT = jnp.where(share_T > 0, nll_ZT, 0)
    nll_Z = jnp.sum(share_T[None] * nll_ZT, axis=-1)
    nll_Z = jnp.where(jnp.isnan(nll_Z), jnp.inf, nll_Z)
    chosen = jnp.argmin(nll_Z)
    return log_sum_ZT[chosen], (chosen, nll_Z[chosen])

  empty_T = jnp.full_like(share_T, -jnp.inf)
  sizes = jnp.arange(1, num_rounds + 1, dtype=jnp.float32)
  _, (chosen, nll) = jax.lax.scan(add_one, empty_T, sizes)
  best = jnp.argmin(nll)
  is_counted = jnp.arange(num_rounds) <= best
  count_Z = jnp.bincount(
    chosen,
    is_counted.astype(jnp.float32),
    length=len(target_log_prob_ZT),
  )
  return count_Z / sizes[best]


def score_sums(
  log_prob_TV: jax.Array,
  target_T: jax.Array,
  weight_T: jax.Array,
) -> dict[str, jax.Array]:
  """Sums over tokens of a prediction's scores, which add up over batches; see `mean_scores`.

  `weight`; `nll` [nats]; `correct`, whether the argmax is the target; `brier`, the squared distance
  of the probabilities from the target's one-hot vector, 0 to 2; and for every bin of confidence,
  the largest probability, `bin_weight`, `bin_confidence` and `bin_correct`. Add them up in Python
  or NumPy: float32 cannot count beyond 2**24 tokens.

  Source: Brier 1950, Verification of forecasts expressed in terms of probability (score P);
  Guo et al. 2017, On calibration of modern neural networks, section 2 (bins).
  """
  vocab_size = log_prob_TV.shape[-1]
  prob_TV = jnp.exp(log_prob_TV)
  log_prob_T1 = jnp.take_along_axis(log_prob_TV, target_T[:, None], axis=-1)
  log_prob_T = log_prob_T1[:, 0]
  is_correct_T = jnp.argmax(log_prob_TV, axis=-1) == target_T
  is_target_TV = jax.nn.one_hot(target_T, vocab_size, dtype=jnp.float32)
  squared_error_TV = jnp.square(prob_TV - is_target_TV)
  brier_T = jnp.sum(squared_error_TV, axis=-1)
  confidence_T = jnp.max(prob_TV, axis=-1)
  bin_T = jnp.ceil(confidence_T * NUM_BINS) - 1
  bin_T = jnp.clip(bin_T, 0, NUM_BINS - 1).astype(jnp.int32)

  correct_T = is_correct_T.astype(jnp.float32)

  def total(values_T: jax.Array) -> jax.Array:
    return jnp.sum(_weighted(values_T, weight_T))

  def per_bin(values_T: jax.Array) -> jax.Array:
    return jnp.bincount(bin_T, _weighted(values_T, weight_T), length=NUM_BINS)

  return {
    "weight": jnp.sum(weight_T),
    "nll": total(-log_prob_T),
    "correct": total(correct_T),
    "brier": total(brier_T),
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
  differ_ZZT = vote_ZT[:, None] != vote_ZT[None]
  num_differ_T = jnp.sum(differ_ZZT, axis=(0, 1)).astype(jnp.float32)
  mean_TV = mean_of_probabilities(log_prob_ZTV, uniform_weights(num_members))
  prob_ZTV = jnp.exp(log_prob_ZTV)
  divergence_ZTV = prob_ZTV * (log_prob_ZTV - mean_TV[None])
  divergence_ZTV = jnp.where(prob_ZTV > 0, divergence_ZTV, 0)
  mean_divergence_TV = jnp.mean(divergence_ZTV, axis=0)
  information_T = jnp.sum(mean_divergence_TV, axis=-1)
  num_pairs = num_members * (num_members - 1)
  disagreement_T = num_differ_T / max(num_pairs, 1)
  return {
    "weight": jnp.sum(weight_T),
    "disagreement": jnp.sum(_weighted(disagreement_T, weight_T)),
    "mutual_information": jnp.sum(_weighted(information_T, weight_T)),
  }


def _weighted(values_T: jax.Array, weight_T: jax.Array) -> jax.Array:
  """Values times weights; 0 for padding, even if its value is not finite."""
  return jnp.where(weight_T > 0, values_T * weight_T, 0)


def mean_scores(sums: Mapping[str, ArrayLike], num_bytes: float) -> dict[str, float]:
  """Means per token of `score_sums`, of `disagreement_sums`, or of both merged.

  `nll` [nats per token], `bits_per_byte` if the text has bytes, `accuracy`, `brier`, `ece`: the
  expected calibration error, the mean distance between a bin's accuracy and its confidence;
  `disagreement`, `mutual_information` [nats per token].

  Source: Guo et al. 2017, On calibration of modern neural networks, eq. 3 (ECE).

  Raises:
    UserError: no token has a weight.
  """
  totals = _in_float64(sums)
  if not totals["weight"] > 0:
    raise UserError("no held-out token to score: give more held-out data")
  if "nll" in totals:
    totals["accuracy"] = totals["correct"]
    distances = np.abs(totals["bin_correct"] - totals["bin_confidence"])
    totals["ece"] = np.asarray(distances.sum())
  means: dict[str, float] = {}
  for name in ("nll", "accuracy", "brier", "ece", "disagreement", "mutual_information"):
    if name in totals:
      mean = totals[name] / totals["weight"]
      means[name] = float(mean)
  if "nll" in totals and num_bytes:
    means["bits_per_byte"] = bits_per_byte(float(totals["nll"]), num_bytes)
  return means


Predict = Callable[[Batch], list[jax.Array]]  # per member, log-probabilities [B, T, V]
Sums = dict[str, np.ndarray]  # by name, sums over tokens in float64


class _Combination(NamedTuple):
  """A way to combine the members' predictions."""

  how: str  # a name of COMBINATIONS
  weight_Z: jax.Array


class _Predictions(NamedTuple):
  """The members' predictions for the tokens of a batch, on one device."""

  log_prob_ZTV: jax.Array
  target_T: jax.Array
  weight_T: jax.Array


def score_combinations(
  predict: Predict,
  batches: Callable[[], Iterator[Batch]],
  num_bytes_V: np.ndarray,
) -> dict[str, JsonObject]:
  """{combination: its sums and `mean_scores`}, the best single member first.

  Weights are chosen on every other batch from the first on, and scored on the rest. With a single
  batch, combinations that need a choice are left out.

  Args:
    predict: per member, log-probabilities [B, T, V] of a batch's targets.
    batches: iterates over the same batches on every call.
    num_bytes_V: bytes of text of every token of the vocabulary.
  """
  num_batches = sum(1 for _ in batches())
  is_single = num_batches < 2
  step = 1 if is_single else 2
  chosen_on = itertools.islice(batches(), 0, None, step)
  scored_on = itertools.islice(batches(), step - 1, None, step)
  combinations = _choose_combinations(predict, chosen_on, is_single)
  totals: dict[str, Sums] = {name: {} for name in combinations}
  disagreement_totals: Sums = {}
  num_bytes = 0.0
  for batch in scored_on:
    predictions = _predictions(predict, batch)
    num_bytes += _count_bytes(batch, num_bytes_V)
    for name, combination in combinations.items():
      sums = _score(
        combination.how,
        predictions.log_prob_ZTV,
        combination.weight_Z,
        predictions.target_T,
        predictions.weight_T,
      )
      _add(totals[name], sums)
    _add(
      disagreement_totals,
      _disagreement(predictions.log_prob_ZTV, predictions.weight_T),
    )
  disagreement = mean_scores(disagreement_totals, 0.0)
  scores: dict[str, JsonObject] = {}
  for name, sums in totals.items():
    scores[name] = {**sums, **mean_scores(sums, num_bytes), **disagreement}
  return scores


def _count_bytes(batch: Batch, num_bytes_V: np.ndarray) -> float:
  """Bytes of text of the targets that have a weight."""
  is_counted_BT = np.asarray(batch.weight_BT) > 0
  num_bytes_BT = num_bytes_V[np.asarray(batch.targets_BT)]
  return float(np.sum(num_bytes_BT[is_counted_BT]))


def _choose_combinations(
  predict: Predict,
  batches: Iterable[Batch],
  is_single: bool,
) -> dict[str, _Combination]:
  """The combinations by name, with weights that are chosen on these batches.

  Args:
    is_single: whether the only batch is also the one that is scored. Then weights other than those
      of the best member are not chosen.
  """
  target_log_probs = []
  weights = []
  for batch in batches:
    predictions = _predictions(predict, batch)
    target_log_probs.append(_target_log_probs(predictions.log_prob_ZTV, predictions.target_T))
    weights.append(predictions.weight_T)
  target_log_prob_ZT = jnp.concatenate(target_log_probs, axis=1)
  weight_T = jnp.concatenate(weights)
  num_members = len(target_log_prob_ZT)
  total_log_prob_Z = jnp.sum(target_log_prob_ZT * weight_T[None], axis=1)
  nll_Z = -total_log_prob_Z / jnp.sum(weight_T)
  best_Z = jax.nn.one_hot(jnp.nanargmin(nll_Z), num_members)
  equal_Z = uniform_weights(num_members)
  combinations = {
    "best member": _Combination("probabilities", best_Z),
    "mean of probabilities": _Combination("probabilities", equal_Z),
    "mean of logits": _Combination("logits", equal_Z),
  }
  if is_single:
    return combinations
  by_loss_Z = loss_weights(nll_Z, LOSS_TEMPERATURE)
  combinations["weighted by held-out loss"] = _Combination("probabilities", by_loss_Z)
  greedy_Z = greedy_weights(target_log_prob_ZT, weight_T, GREEDY_ROUNDS)
  combinations["greedy selection"] = _Combination("probabilities", greedy_Z)
  return combinations


def _predictions(predict: Predict, batch: Batch) -> _Predictions:
  """The members' predictions for a batch, with all rows concatenated."""
  # It waits: simulated devices that gather several batches at the same time deadlock.
  on_host = jax.device_get(predict(batch))
  by_member = []
  for log_prob_BTV in on_host:
    vocab_size = log_prob_BTV.shape[-1]
    by_member.append(log_prob_BTV.reshape(-1, vocab_size))
  return _Predictions(
    log_prob_ZTV=jnp.asarray(np.stack(by_member)),
    target_T=jnp.ravel(cast(np.ndarray, batch.targets_BT)),
    weight_T=jnp.ravel(cast(np.ndarray, batch.weight_BT)),
  )


@jax.jit
def _target_log_probs(log_prob_ZTV: jax.Array, target_T: jax.Array) -> jax.Array:
  """Each member's log-probabilities [Z, T] of the targets."""
  target_1T1 = target_T[None, :, None]
  log_prob_ZT1 = jnp.take_along_axis(log_prob_ZTV, target_1T1, axis=2)
  return log_prob_ZT1[..., 0]


@functools.partial(jax.jit, static_argnums=0)
def _score(
  how: str,
  log_prob_ZTV: jax.Array,
  weight_Z: jax.Array,
  target_T: jax.Array,
  weight_T: jax.Array,
) -> dict[str, jax.Array]:
  """The `score_sums` of a combination, by its name in COMBINATIONS."""
  log_prob_TV = COMBINATIONS[how](log_prob_ZTV, weight_Z)
  return score_sums(log_prob_TV, target_T, weight_T)


_disagreement = jax.jit(disagreement_sums)


def _add(totals: Sums, sums: Mapping[str, jax.Array]) -> None:
  """Add sums to totals in float64 on the host: float32 cannot count beyond 2**24 tokens."""
  for name, value in _in_float64(jax.device_get(sums)).items():
    if name in totals:
      totals[name] = totals[name] + value
    else:
      totals[name] = value


def _in_float64(sums: Mapping[str, ArrayLike]) -> Sums:
  converted = {}
  for name, value in sums.items():
    converted[name] = np.asarray(value, np.float64)
  return converted
