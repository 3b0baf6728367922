"""Fits of ladders find the law of simulated losses, with intervals that hold what they promise."""

import math

import numpy as np
import pytest
from support.slow_cases import slow

from maxlite.evaluation.isoflop import Cell, fit_ladder

BUDGETS = (1e12, 1e13, 1e14)
FACTORS = (0.25, 0.5, 1, 2, 4)  # of the best size
# loss = E + A / parameters^a + B / tokens^b, with the exponents of Hoffmann et al. (2022), and
# others: b - a is -0.06, 0.02 and 0.1.
LAWS = {"hoffmann": (0.34, 0.28), "alike": (0.35, 0.37), "tokens": (0.3, 0.4)}
E, A, B = 1.7, 40.0, 60.0


def loss_of(budget, size, exponents):
  a, b = exponents
  return E + A / size**a + B / (budget / (6 * size)) ** b


def best_size(budget, exponents):
  """Where the derivative of the loss by the size is zero."""
  a, b = exponents
  return (a * A / (b * B)) ** (1 / (a + b)) * (budget / 6) ** (b / (a + b))


def cells_of(
  exponents, draw, noise=0.0, seeds=2, factors=FACTORS, budgets=BUDGETS, heavy_tails=False
):
  cells = []
  for budget in budgets:
    for width, factor in enumerate(factors):
      size = round(best_size(budget, exponents) * factor)
      errors = draw.normal(size=seeds)
      if heavy_tails:
        errors = draw.standard_t(3, size=seeds) / math.sqrt(3)
      losses = loss_of(budget, size, exponents) + noise * errors
      cells.append(Cell(budget, width, size, budget / (6 * size), tuple(losses.tolist())))
  return cells


def contains(interval, value):
  return interval.low <= value <= interval.high


def coverage(num_ladders, law, **keys):
  """The share of intervals that contain the truth, by what they are of."""
  exponents = LAWS[law]
  a, b = exponents
  draw = np.random.default_rng(0)
  hits = {name: [] for name in ("parameters", "tokens", "loss", "exponent", "next")}
  for seed in range(num_ladders):
    fit = fit_ladder(cells_of(exponents, draw, **keys), seed)
    for found in fit.budgets:
      if found.refusal:
        continue
      size = best_size(found.budget, exponents)
      hits["parameters"].append(contains(found.parameters, size))
      hits["tokens"].append(contains(found.tokens, found.budget / (6 * size)))
      hits["loss"].append(contains(found.loss, loss_of(found.budget, size, exponents)))
    if fit.parameters is not None:
      law_of_size = fit.parameters
      size = best_size(law_of_size.next_budget, exponents)
      hits["exponent"].append(contains(law_of_size.exponent, b / (a + b)))
      hits["next"].append(contains(law_of_size.next_value, size))
  return {name: float(np.mean(each)) for name, each in hits.items()}


@pytest.mark.parametrize(
  ("num_ladders", "law", "keys"),
  [
    (150, "hoffmann", {"noise": 0.01}),
    slow(1000, "hoffmann", {"noise": 0.01}),
    slow(1000, "hoffmann", {"noise": 0.005, "seeds": 1}),
    slow(1000, "hoffmann", {"noise": 0.03, "seeds": 4}),
    slow(1000, "hoffmann", {"noise": 0.02, "heavy_tails": True}),
    slow(1000, "hoffmann", {"noise": 0.01, "factors": (0.4, 0.8, 1.6, 3.2)}),  # not centred
    slow(1000, "alike", {"noise": 0.01}),
    slow(1000, "tokens", {"noise": 0.01}),
  ],
)
def test_intervals_cover_the_law(num_ladders, law, keys):
  """At least 95 %, less three standard errors of the simulation."""
  for name, share in coverage(num_ladders, law, **keys).items():
    count = num_ladders if name in ("exponent", "next") else 3 * num_ladders
    assert share > 0.95 - 3 * math.sqrt(0.05 * 0.95 / count) - 0.01, name


def test_intervals_shrink_with_the_noise():
  widths = []
  for noise in (0.02, 0.04):
    cells = cells_of(LAWS["alike"], np.random.default_rng(0), noise)
    first = fit_ladder(cells).budgets[0].parameters
    widths.append(math.log(first.high / first.low))
  assert widths[1] > 1.4 * widths[0]


def test_a_law_without_noise_is_found():
  """The parabola's vertex is within two percent, and the exponent of a power law is exact."""
  fit = fit_ladder(cells_of(LAWS["alike"], np.random.default_rng(0)))
  for found in fit.budgets:
    size = best_size(found.budget, LAWS["alike"])
    assert found.refusal == ""
    np.testing.assert_allclose(found.parameters.value, size, rtol=0.02)
    np.testing.assert_allclose(found.tokens.value, found.budget / 6 / size, rtol=0.02)
  a, b = LAWS["alike"]
  np.testing.assert_allclose(fit.parameters.exponent.value, b / (a + b), atol=2e-3)
  np.testing.assert_allclose(fit.tokens.exponent.value, a / (a + b), atol=2e-3)


def test_the_vertex_of_a_parabola_is_exact():
  cells = []
  for n, x in enumerate((8.0, 9.0, 10.0, 11.5)):
    size = round(math.exp(x))
    loss = 2 + 0.1 * (math.log(size) - 9.5) ** 2
    cells.append(Cell(1e12, n, size, 1e12 / size, (loss, loss)))
  [found] = fit_ladder(cells).budgets
  np.testing.assert_allclose(found.parameters.value, math.exp(9.5), rtol=1e-6)
  np.testing.assert_allclose(found.loss.value, 2, rtol=1e-9)


@pytest.mark.parametrize(("factors", "edge"), [((2, 3, 5, 8), -1), ((0.1, 0.2, 0.4, 0.6), 1)])
def test_minima_at_an_edge_are_refused(factors, edge):
  cells = cells_of(LAWS["hoffmann"], np.random.default_rng(0), 0.001, factors=factors)
  fit = fit_ladder(cells)
  width = 0 if edge < 0 else 3
  for found in fit.budgets:
    assert found.edge == edge
    assert found.refusal == f"the minimum is at the edge, width {width}"
  assert fit.parameters is None


def test_one_refused_budget_is_not_in_the_law():
  draw = np.random.default_rng(0)
  cells = cells_of(LAWS["hoffmann"], draw, 0.005)
  whole = fit_ladder(cells)
  far = cells_of(LAWS["hoffmann"], draw, 0.005, factors=(3, 5, 8, 12), budgets=(1e15,))
  fit = fit_ladder([*cells, *far])
  assert [bool(found.refusal) for found in fit.budgets] == [False, False, False, True]
  before = whole.parameters.exponent.value
  np.testing.assert_allclose(fit.parameters.exponent.value, before, atol=2e-3)
  assert fit.parameters.next_budget == 1e15


def test_noise_has_no_minimum():
  draw = np.random.default_rng(0)
  cells = [
    Cell(1e12, n, size, 1e12 / size, tuple(3 + draw.normal(size=2)))
    for n, size in enumerate((1000, 2000, 4000, 8000, 16000))
  ]
  [found] = fit_ladder(cells).budgets
  assert found.refusal.startswith("no minimum")


def test_diverged_runs_are_left_out():
  cells = cells_of(LAWS["hoffmann"], np.random.default_rng(0), 0.005)
  broken = [cells[0]._replace(losses=(*cells[0].losses, math.nan)), *cells[1:]]
  assert fit_ladder(broken) == fit_ladder(cells)
  lost = [cell._replace(losses=(math.nan,)) if cell.width < 2 else cell for cell in cells]
  fit = fit_ladder(lost)
  for found in fit.budgets:
    assert found.refusal.startswith("3 sizes have a loss, too few")
  assert fit.parameters is None
