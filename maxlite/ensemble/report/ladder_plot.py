"""The picture of a ladder: losses over parameters per budget, and the best sizes over budgets."""

import math
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from maxlite.config.ladder import budget_name
from maxlite.evaluation.isoflop import BudgetFit, LadderFit
from maxlite.metrics.plots.figure import GRAY, Color, new_figure, save_figure, style_axes

_COLORS = colormaps["viridis"]


def draw_ladder(fit: LadderFit, png_path: Path) -> None:
  """Draw a ladder.

  On the left, for every budget, the losses of all runs, the parabola, and its minimum with the
  interval; a minimum that does not count has no mark, and its parabola is dotted. On the right the
  minima over budgets, with the law if there is one.

  Args:
    fit: the ladder.
    png_path: where the plot is saved.
  """
  figure = new_figure(10, 4.2, w_pad=0.12)
  losses, sizes = figure.subplots(1, 2, width_ratios=(3, 2))
  for n, found in enumerate(fit.budgets):
    color = _COLORS(0.85 * n / max(len(fit.budgets) - 1, 1))
    _draw_budget(losses, found, color)
    if not found.refusal:
      _draw_size(sizes, found, color)
  losses.set(xscale="log", xlabel="parameters", ylabel="held-out loss (nats per token)")
  losses.legend(title="FLOPs", title_fontsize=9, fontsize=9, frameon=False)
  _draw_law(sizes, fit)
  sizes.set(xscale="log", yscale="log", xlabel="FLOPs", ylabel="best number of parameters")
  for axes in (losses, sizes):
    style_axes(axes)
  save_figure(figure, png_path)


def _draw_budget(axes: Axes, found: BudgetFit, color: Color) -> None:
  parameters = [cell.num_parameters for cell in found.cells for _ in cell.losses]
  losses = [loss for cell in found.cells for loss in cell.losses]
  axes.plot(parameters, losses, "o", color=color, markersize=3, alpha=0.7)
  first, last = (math.log(found.cells[n].num_parameters) for n in (0, -1))
  logs = np.linspace(first, last, 100)
  curve = np.polynomial.Polynomial(found.parabola)(logs - found.center)
  style = ":" if found.refusal else "-"
  label = budget_name(found.budget)
  if found.refusal:
    label += ", no minimum"
  axes.plot(np.exp(logs), curve, style, color=color, linewidth=1.2, label=label)
  if not found.refusal:
    best = found.parameters
    axes.hlines(found.loss.value, best.low, best.high, color=color, linewidth=3, alpha=0.4)
    axes.plot(best.value, found.loss.value, "*", color=color, markersize=11)


def _draw_size(axes: Axes, found: BudgetFit, color: Color) -> None:
  axes.vlines(found.budget, found.parameters.low, found.parameters.high, color=color)
  axes.plot(found.budget, found.parameters.value, "*", color=color, markersize=11)


def _draw_law(axes: Axes, fit: LadderFit) -> None:
  """Draw the law up to the next budget, and its interval there."""
  law = fit.parameters
  if law is None:
    return
  budgets = np.array([min(found.budget for found in fit.budgets), law.next_budget])
  line = law.coefficient * budgets**law.exponent.value
  low, high = law.exponent.low, law.exponent.high
  label = f"FLOPs^{law.exponent.value:.2f} ({low:.2f} to {high:.2f})"
  axes.plot(budgets, line, "--", color=GRAY, linewidth=1, label=label)
  axes.vlines(law.next_budget, law.next_value.low, law.next_value.high, color=GRAY)
  axes.legend(fontsize=9, frameon=False, loc="upper left")
