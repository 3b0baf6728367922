"""Intervals of paired differences hold what they promise, on simulated losses."""

import numpy as np
import pytest

from maxlite.evaluation.paired import (
  bootstrap_difference,
  bootstrap_ratios,
  paired_difference,
  standard_error,
)


def test_the_interval_is_students():
  """By hand: differences 1, 2, 3 have mean 2, standard error 1 / sqrt(3), quantile 4.302653."""
  found = paired_difference([2.0, 3.0, 4.0], [1.0, 1.0, 1.0])
  np.testing.assert_allclose(found, [2, 2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5], rtol=1e-6)
  assert not found.is_distinguishable
  assert paired_difference([1.0, 1.1], [2.0, 2.1]).is_distinguishable
  np.testing.assert_allclose(standard_error([1.0, 2.0, 3.0]), 3**-0.5)
  with pytest.raises(ValueError, match="two pairs"):
    paired_difference([1.0], [2.0])


def test_five_percent_of_equals_are_called_different():
  draw = np.random.default_rng(0)
  for num_seeds in (2, 4):
    wrong = 0
    for _ in range(2000):
      shared = draw.normal(size=num_seeds)  # what both get from their seeds' data
      firsts, seconds = shared + 0.1 * draw.normal(size=(2, num_seeds))
      wrong += paired_difference(firsts.tolist(), seconds.tolist()).is_distinguishable
    assert 0.035 < wrong / 2000 < 0.065


def simulate(draw, gap, num_documents=60):
  """Sums of two models over documents whose difficulty they share, and by how much they differ."""
  weights_D = draw.integers(20, 400, num_documents).astype(float)
  difficulty_D = 2 + draw.normal(size=num_documents)
  noise_RD = 0.2 * draw.normal(size=(2, num_documents))
  sums_RD = weights_D * (difficulty_D + noise_RD + np.array([[gap], [0.0]]))
  return sums_RD, np.stack([weights_D, weights_D])


@pytest.mark.slow
def test_the_bootstrap_covers_the_true_difference():
  draw = np.random.default_rng(1)
  covered = 0
  for number in range(100):
    sums_RD, weights_RD = simulate(draw, 0.05)
    ratios_BR = bootstrap_ratios(sums_RD, weights_RD, number)
    found = bootstrap_difference(sums_RD, weights_RD, ratios_BR, 0, 1)
    covered += found.low <= 0.05 <= found.high
    assert found.high - found.low < 0.3  # by pairs: the documents alone vary by 0.25 each side
  assert 88 <= covered <= 99


def test_resamples_are_paired():
  sums_RD, weights_RD = simulate(np.random.default_rng(2), 0.0)
  sums_RD[1] = sums_RD[0] + 0.01 * weights_RD[0]
  ratios_BR = bootstrap_ratios(sums_RD, weights_RD)
  found = bootstrap_difference(sums_RD, weights_RD, ratios_BR, 0, 1)
  np.testing.assert_allclose(found, -0.01, rtol=1e-9)
  assert np.std(ratios_BR[:, 0]) > 0.05
