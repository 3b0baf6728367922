"""Scores of every combination of the members' predictions on held-out text."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.data.batch import Batch
from maxlite.ensemble.ensemble_metrics import (
  COMBINATIONS,
  disagreement_sums,
  greedy_weights,
  loss_weights,
  mean_scores,
  score_sums,
  uniform_weights,
)

LOSS_TEMPERATURE = 0.1  # [nats per token] a member worse by this has 1/e of the weight
GREEDY_ROUNDS = 50


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
