"""The best model size of each budget of FLOPs: parabolas over log parameters, with intervals.

Runs of one budget have different sizes and so many tokens that all cost the same FLOPs. Their final
losses are a parabola in the logarithm of the parameters near its minimum, which is the best size of
that budget; over budgets, the best sizes are a power law (IsoFLOP profiles, approach 2 of Hoffmann
et al., Training Compute-Optimal Large Language Models, 2022).

Intervals have a level of at least 95 %. They come from a bootstrap of residuals (Efron and
Tibshirani 1993, An introduction to the bootstrap, chapter 9), which are pooled over budgets and
drawn with replacement, each divided by the square root of the share that the fit leaves of it. A
few residuals say little about their spread, so each resample has a spread from the chi-squared
distribution, as in Student's interval. Nor is a law a parabola: with loss = E + A / parameters^a +
B / tokens^b, the third derivative is b - a times the second, which moves the vertex. Published fits
have a and b within 0.1 of each other, so each resample has a skew with that deviation.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxlite.config.ladder import MIN_WIDTHS
from maxlite.evaluation.paired import LEVEL

NUM_RESAMPLES = 4_000
SKEW = 0.1  # deviation of the third derivative over the second
_MAX_CONCAVE = 0.025  # share of resamples without a minimum, above which the fit is refused


class Cell(NamedTuple):
  """The runs of one budget and one size."""

  budget: float  # FLOPs
  width: int
  num_parameters: int
  num_tokens: float
  losses: tuple[float, ...]  # final held-out losses [nats per token], by seed


class Interval(NamedTuple):
  """An estimate with its 95 % interval."""

  value: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class BudgetFit:
  """The minimum of one budget.

  Attributes:
    refusal: why it has no minimum that counts; empty if it has.
    edge: -1 or 1 if the minimum is at the smallest or at the largest size; otherwise 0.
    parabola: coefficients of loss = a + b x + c x^2, where x is the logarithm of the parameters
      minus `center`; NaN without a fit.
    parameters: the best number of parameters.
    tokens: the tokens of that size.
    loss: the loss there.
  """

  budget: float
  cells: tuple[Cell, ...]
  refusal: str
  edge: int
  center: float
  parabola: tuple[float, float, float]
  parameters: Interval
  tokens: Interval
  loss: Interval


@dataclasses.dataclass(frozen=True)
class PowerLaw:
  """value = coefficient * FLOPs ** exponent, and the value at a larger budget."""

  coefficient: float
  exponent: Interval
  next_budget: float
  next_value: Interval


@dataclasses.dataclass(frozen=True)
class LadderFit:
  """The fits of all budgets; the laws are None with fewer than two minima."""

  budgets: tuple[BudgetFit, ...]
  parameters: PowerLaw | None
  tokens: PowerLaw | None


class _Parabola(NamedTuple):
  """A least-squares fit of one budget."""

  center: float
  design_R3: np.ndarray
  inverse_3R: np.ndarray
  coefficients_3: np.ndarray
  residuals_R: np.ndarray
  leverage_R: np.ndarray


def fit_ladder(cells: Sequence[Cell], seed: int = 0) -> LadderFit:
  """Fit every budget, and the laws over budgets.

  Args:
    cells: of one ladder. Losses that are not finite are of runs that diverged, and left out.
    seed: of the bootstrap.

  Returns:
    The budgets in ascending order.
  """
  by_budget: dict[float, list[Cell]] = {}
  for cell in sorted(cells):
    by_budget.setdefault(cell.budget, []).append(_finite(cell))
  fitted = {}
  for budget, own in by_budget.items():
    if sum(bool(cell.losses) for cell in own) >= MIN_WIDTHS:
      fitted[budget] = _fit_parabola(own)
  resampled = _resample(list(fitted.values()), np.random.default_rng(seed))
  minima: list[BudgetFit] = []
  logs_of: dict[float, np.ndarray] = {}  # by budget with a minimum, [B, 2]: parameters and tokens
  for budget, own in by_budget.items():
    if budget not in fitted:
      minima.append(_without_fit(budget, own))
      continue
    index = list(fitted).index(budget)
    minimum, logs_B2 = _minimum(budget, own, fitted[budget], resampled[index])
    minima.append(minimum)
    if not minimum.refusal:
      logs_of[budget] = logs_B2
  laws: list[PowerLaw | None] = [None, None]
  if len(logs_of) > 1:
    found = [each for each in minima if not each.refusal]
    budgets = [each.budget for each in found]
    for n, values in enumerate(
      ([each.parameters.value for each in found], [each.tokens.value for each in found])
    ):
      logs_CB = np.stack([logs_B2[:, n] for logs_B2 in logs_of.values()])
      laws[n] = _power_law(budgets, values, logs_CB)
  return LadderFit(tuple(minima), laws[0], laws[1])


def _finite(cell: Cell) -> Cell:
  return cell._replace(losses=tuple(loss for loss in cell.losses if math.isfinite(loss)))


def _fit_parabola(cells: Sequence[Cell]) -> _Parabola:
  x_R = np.array([math.log(cell.num_parameters) for cell in cells for _ in cell.losses])
  y_R = np.array([loss for cell in cells for loss in cell.losses])
  center = float((x_R.min() + x_R.max()) / 2)
  design_R3 = np.vander(x_R - center, 3, increasing=True)
  inverse_3R = np.linalg.pinv(design_R3)
  coefficients_3 = inverse_3R @ y_R
  return _Parabola(
    center=center,
    design_R3=design_R3,
    inverse_3R=inverse_3R,
    coefficients_3=coefficients_3,
    residuals_R=y_R - design_R3 @ coefficients_3,
    leverage_R=np.einsum("rk,kr->r", design_R3, inverse_3R),
  )


def _resample(fits: Sequence[_Parabola], draw: np.random.Generator) -> list[np.ndarray]:
  """Per fit, resampled coefficients [NUM_RESAMPLES, 3]."""
  if not fits:
    return []
  freedom = sum(len(fit.residuals_R) - 3 for fit in fits)
  pooled = []
  for fit in fits:
    pooled.append(fit.residuals_R / np.sqrt(np.maximum(1 - fit.leverage_R, 1e-9)))
  pool_P = np.concatenate(pooled)
  pool_P = pool_P - pool_P.mean()
  # The pool has the spread of the residuals' unbiased estimate.
  variance = sum(float(fit.residuals_R @ fit.residuals_R) for fit in fits) / freedom
  pool_P = pool_P * math.sqrt(variance / max(float(np.mean(pool_P**2)), 1e-300))
  spread_B1 = np.sqrt(freedom / draw.chisquare(freedom, (NUM_RESAMPLES, 1)))
  resampled = []
  skew_B1 = draw.normal(0, SKEW, (NUM_RESAMPLES, 1))
  for fit in fits:
    noise_BR = spread_B1 * draw.choice(pool_P, (NUM_RESAMPLES, len(fit.residuals_R)))
    noise_BR += skew_B1 * fit.coefficients_3[2] / 3 * fit.design_R3[:, 1] ** 3
    resampled.append(fit.coefficients_3 + noise_BR @ fit.inverse_3R.T)
  return resampled


def _minimum(
  budget: float, cells: Sequence[Cell], fit: _Parabola, resampled_B3: np.ndarray
) -> tuple[BudgetFit, np.ndarray]:
  """The minimum of a budget, and its resamples [B, 2]: logarithms of parameters and tokens."""
  sizes = np.array([math.log(cell.num_parameters) for cell in cells])
  tokens = np.array([math.log(cell.num_tokens) for cell in cells])
  means = [float(np.mean(cell.losses)) if cell.losses else math.inf for cell in cells]
  best = int(np.argmin(means))
  # FLOPs per token are a smooth function of the size: interpolated, and extended beyond the ends.
  tokens_of = np.polynomial.Polynomial.fit(sizes, tokens, min(2, len(cells) - 1))
  value, loss = (float(each) for each in _vertex(fit.coefficients_3))
  values_B, losses_B = _vertex(resampled_B3.T)
  is_minimum_B = resampled_B3[:, 2] > 0
  at_min = value + fit.center
  edge = 0
  refusal = ""
  if fit.coefficients_3[2] <= 0 or np.mean(~is_minimum_B) > _MAX_CONCAVE:
    refusal = "no minimum: the losses do not curve upwards by more than their noise"
  elif best == 0 or at_min < sizes[0]:
    edge = -1
  elif best == len(cells) - 1 or at_min > sizes[-1]:
    edge = 1
  if edge:
    refusal = f"the minimum is at the edge, width {cells[0 if edge < 0 else -1].width}"
  logs_B = np.where(is_minimum_B, values_B + fit.center, np.nan)
  logs_B2 = np.stack([logs_B, tokens_of(logs_B)], axis=1)
  found = BudgetFit(
    budget=budget,
    cells=tuple(cells),
    refusal=refusal,
    edge=edge,
    center=fit.center,
    parabola=tuple(fit.coefficients_3.tolist()),
    parameters=_exp(_interval(at_min, logs_B)),
    tokens=_exp(_interval(float(tokens_of(at_min)), logs_B2[:, 1])),
    loss=_interval(loss, np.where(is_minimum_B, losses_B, np.nan)),
  )
  return found, logs_B2


def _vertex(coefficients_3: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(where the parabola is flat, its value there), of one or of many parabolas."""
  a, b, c = coefficients_3
  with np.errstate(divide="ignore", invalid="ignore"):
    x = -b / (2 * c)
    return x, a + b * x / 2


def _without_fit(budget: float, cells: Sequence[Cell]) -> BudgetFit:
  nothing = Interval(math.nan, math.nan, math.nan)
  count = sum(bool(cell.losses) for cell in cells)
  return BudgetFit(
    budget=budget,
    cells=tuple(cells),
    refusal=f"{count} sizes have a loss, too few for a parabola; write {MIN_WIDTHS} or more",
    edge=0,
    center=math.nan,
    parabola=(math.nan, math.nan, math.nan),
    parameters=nothing,
    tokens=nothing,
    loss=nothing,
  )


def _power_law(budgets: Sequence[float], values: Sequence[float], logs_CB: np.ndarray) -> PowerLaw:
  """The law through the minima of C budgets, each with the weight of its resamples' spread."""
  x_C = np.log(budgets)
  center = float(x_C.mean())
  spread_C = np.nanstd(logs_CB, axis=1)
  weight_C1 = 1 / np.maximum(spread_C, 1e-9)[:, None]
  design_C2 = np.stack([np.ones_like(x_C), x_C - center], axis=1)
  inverse_2C = np.linalg.pinv(weight_C1 * design_C2)
  level, exponent = inverse_2C @ (weight_C1[:, 0] * np.log(values))
  levels_B, exponents_B = inverse_2C @ (weight_C1 * logs_CB)
  next_budget = 10 * max(budgets)
  further = math.log(next_budget) - center
  return PowerLaw(
    coefficient=math.exp(level - exponent * center),
    exponent=_interval(float(exponent), exponents_B),
    next_budget=next_budget,
    next_value=_exp(_interval(float(level + exponent * further), levels_B + exponents_B * further)),
  )


def _interval(value: float, resamples_B: np.ndarray) -> Interval:
  tail = (1 - LEVEL) / 2
  low, high = np.nanquantile(resamples_B, [tail, 1 - tail])
  return Interval(float(value), float(low), float(high))


def _exp(logs: Interval) -> Interval:
  return Interval(*(math.exp(min(value, 700)) for value in logs))
