"""Whether two losses differ by more than chance: intervals of paired differences.

Both intervals have a level of 95 % for one comparison. Of twenty comparisons of equals, one is
expected to exclude zero, and the best of several is chosen by its luck too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

LEVEL = 0.95
NUM_RESAMPLES = 10_000
_CHUNK = 10_000_000  # entries of the arrays of counts that are in memory at once


class Difference(NamedTuple):
  """A difference with its 95 % interval; negative: the first is lower."""

  mean: float
  low: float
  high: float

  @property
  def is_distinguishable(self) -> bool:
    """Whether the interval excludes zero."""
    return not self.low <= 0 <= self.high


def standard_error(values: Sequence[float]) -> float:
  """The standard error of the mean of at least two values."""
  return float(np.std(values, ddof=1) / np.sqrt(len(values)))


def paired_difference(firsts: Sequence[float], seconds: Sequence[float]) -> Difference:
  """The mean of firsts - seconds, which are pairs, with Student's interval.

  Raises:
    ValueError: there are fewer than two pairs.
  """
  differences = np.subtract(firsts, seconds, dtype=np.float64)
  if len(differences) < 2:
    raise ValueError("an interval takes at least two pairs")
  mean = float(np.mean(differences))
  quantile = float(special.stdtrit(len(differences) - 1, (1 + LEVEL) / 2))
  half = quantile * standard_error(differences.tolist())
  return Difference(mean, mean - half, mean + half)


def bootstrap_ratios(sums_RD: np.ndarray, weights_RD: np.ndarray, seed: int = 0) -> np.ndarray:
  """Resampled values of sum / weight of R models over D documents: [NUM_RESAMPLES, R], float64.

  Every resample draws D documents with replacement, the same for all models, so differences of its
  columns are paired (Efron and Tibshirani 1993, An introduction to the bootstrap, chapter 8).
  """
  num_documents = sums_RD.shape[1]
  draw = np.random.default_rng(seed)
  shares_D = np.full(num_documents, 1 / num_documents)
  rows_at_once = max(1, _CHUNK // num_documents)
  ratios = []
  for start in range(0, NUM_RESAMPLES, rows_at_once):
    size = min(rows_at_once, NUM_RESAMPLES - start)
    counts_BD = draw.multinomial(num_documents, shares_D, size)
    ratios.append((counts_BD @ sums_RD.T) / (counts_BD @ weights_RD.T))
  return np.concatenate(ratios)


def bootstrap_difference(
  sums_RD: np.ndarray, weights_RD: np.ndarray, ratios_BR: np.ndarray, first: int, second: int
) -> Difference:
  """The difference of two models' sum / weight, with the percentile interval of the resamples."""
  values_R = sums_RD.sum(axis=1) / weights_RD.sum(axis=1)
  differences_B = ratios_BR[:, first] - ratios_BR[:, second]
  tail = (1 - LEVEL) / 2
  low, high = np.quantile(differences_B, [tail, 1 - tail])
  return Difference(float(values_R[first] - values_R[second]), float(low), float(high))
