"""Calibration shows accuracy over confidence."""

import numpy as np
import pytest
from drawn_figures import figure_of
from matplotlib.image import imread

from maxlite.metrics.plots.calibration import draw_calibration


def bins(confidence, accuracy, weight=100.0):
  """A method with all tokens in the bin of `confidence`."""
  weight_C = np.zeros(15)
  weight_C[min(int(confidence * 15), 14)] = weight
  return {
    "bin_weight": weight_C,
    "bin_confidence": weight_C * confidence,
    "bin_correct": weight_C * accuracy,
    "ece": abs(confidence - accuracy),
  }


def test_bins_with_few_tokens_have_no_accuracy(monkeypatch):
  many = bins(0.5, 0.4, weight=1000.0)
  few = bins(0.9, 0.0, weight=3.0)
  method = {key: many[key] + few[key] for key in many}
  above, below = figure_of(monkeypatch, draw_calibration, {"one": method}).axes
  _, curve = above.lines
  np.testing.assert_allclose(np.transpose(curve.get_data()), [(0.5, 0.4)])
  assert (below.patches[0].get_data().values > 0).sum() == 2


def test_overconfidence_is_below_the_diagonal(monkeypatch):
  methods = {"overconfident": bins(0.9, 0.1), "underconfident": bins(0.5, 0.9)}
  above, _ = figure_of(monkeypatch, draw_calibration, methods).axes
  diagonal, overconfident, underconfident = above.lines
  np.testing.assert_array_equal(diagonal.get_xdata(), diagonal.get_ydata())
  np.testing.assert_allclose(overconfident.get_xydata(), [(0.9, 0.1)])
  np.testing.assert_allclose(underconfident.get_xydata(), [(0.5, 0.9)])


def test_the_legend_of_calibration_covers_no_curve(monkeypatch):
  methods = {name: bins(0.9, 0.5) for name in ("mean of probabilities", "best member", "vote")}
  figure = figure_of(monkeypatch, draw_calibration, methods)
  figure.draw_without_rendering()
  legend = figure.legends[0].get_window_extent()
  assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)


@pytest.mark.parametrize(
  "methods",
  [{}, {"empty": bins(0.5, 0.5, weight=0)}, {f"method {i}": bins(i / 8, 0.5) for i in range(8)}],
  ids=len,
)
def test_edge_cases_of_calibration_are_drawn(tmp_path, methods):
  draw_calibration(methods, tmp_path / "plot.png")
  assert imread(tmp_path / "plot.png").ndim == 3
