"""The calibration of the predictions of an ensemble and of its members."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from maxlite.metrics.plots.figure import GRAY, new_figure, save_figure, shorten, style_axes

# A bin with fewer is not drawn: the standard error of its accuracy is up to 0.1.
MIN_BIN_TOKENS = 30
METHOD_COLORS = ("#2a6fbb", "#d95f02", "#1b9e77", "#b5338a", "#8c6d1f", "#555555")


class Calibration(TypedDict):
  """The calibration of a method: sums over the tokens of each bin of equal width.

  Attributes:
    bin_weight: number of tokens.
    bin_confidence: sum of their confidences.
    bin_correct: number of correct ones.
    ece: the expected calibration error.
  """

  bin_weight: Sequence[float]
  bin_confidence: Sequence[float]
  bin_correct: Sequence[float]
  ece: float


def draw_calibration(methods: Mapping[str, Calibration], png_path: Path) -> None:
  """Draw accuracy over confidence for each method, and below it the histogram of confidences.

  The accuracy of bins with fewer than `MIN_BIN_TOKENS` tokens is not drawn.

  Args:
    methods: the calibration of each method, by name.
    png_path: where the plot is saved.
  """
  figure = new_figure(5.6, 7, w_pad=0.12, h_pad=0.08)
  above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
  above.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle="--", label="calibrated")
  for index, (name, method) in enumerate(methods.items()):
    round_of_colors, color_index = divmod(index, len(METHOD_COLORS))
    color = METHOD_COLORS[color_index]
    linestyle = "-"
    if round_of_colors % 2 == 1:
      linestyle = "-."
    _draw_accuracy(above, name, method, color, linestyle)
    weight_C = np.asarray(method["bin_weight"], np.float64)
    below.stairs(
      weight_C / max(weight_C.sum(), 1e-30),
      np.linspace(0, 1, len(weight_C) + 1),
      baseline=None,
      color=color,
      linestyle=linestyle,
      linewidth=1.5,
    )
  above.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), box_aspect=1)
  figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=2)
  below.set(xlabel="confidence", ylabel="share of tokens", ylim=(0, None), box_aspect=1 / 3)
  below.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
  style_axes(above)
  style_axes(below)
  save_figure(figure, png_path)


def _draw_accuracy(axes: Axes, name: str, method: Calibration, color: str, linestyle: str) -> None:
  """Draw the accuracy over the confidence of a method, in the bins that have enough tokens."""
  weight_C = np.asarray(method["bin_weight"], np.float64)
  confidence_C = np.asarray(method["bin_confidence"], np.float64)
  correct_C = np.asarray(method["bin_correct"], np.float64)
  used = weight_C >= MIN_BIN_TOKENS
  error_percent = 100 * method["ece"]
  axes.plot(
    confidence_C[used] / weight_C[used],
    correct_C[used] / weight_C[used],
    marker="o",
    markersize=3.5,
    label=f"{shorten(name)} (ECE {error_percent:.2f} %)",
    color=color,
    linestyle=linestyle,
    linewidth=1.5,
  )
