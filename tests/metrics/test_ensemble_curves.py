"""Learning curves show ranks and divergence, and edge cases are drawn without a warning."""

import math

import numpy as np
import pytest
from drawn_figures import figure_of
from matplotlib.image import imread

from maxlite.metrics.plots.ensemble_curves import NUM_LABELLED, draw_learning_curves, spread
from maxlite.metrics.plots.figure import BEST_TO_WORST, CROWD, GRAY

CURVE_WIDTH = 1.6  # of a held-out curve; the line of a marker is thinner


def learning(floor, steps=100, broken=False):
  """Rows of a member whose loss falls to `floor`."""
  rows = []
  for step in range(0, steps + 1, 10):
    loss = 4 * math.exp(-step / 30) + floor
    rows.append({"step": step, "loss": loss, "eval_loss": loss + 0.1})
  if broken:
    rows.append({"step": steps + 10, "loss": None})
  return rows


def evaluated(*losses):
  return [{"step": step, "eval_loss": loss} for step, loss in enumerate(losses)]


def held_out_curves(axes):
  """The held-out curves, best first."""
  curves = [line for line in axes.lines if line.get_linewidth() == CURVE_WIDTH]
  return sorted(curves, key=lambda line: -line.get_zorder())


def crosses(axes):
  return [line for line in axes.lines if line.get_marker() == "x"]


def test_curves_are_colored_by_rank_and_a_diverged_member_has_a_cross(monkeypatch):
  curves = {"c": learning(3.0), "a": learning(1.0), "b": learning(2.0)}
  axes = figure_of(monkeypatch, draw_learning_curves, curves).axes[0]
  drawn = held_out_curves(axes)
  lowest = [line.get_ydata()[-1] for line in drawn]
  np.testing.assert_allclose(lowest, [1.1, 2.1, 3.1], atol=0.2)
  for line, share in zip(drawn, (0.0, 0.5, 1.0), strict=True):
    np.testing.assert_array_equal(line.get_color(), BEST_TO_WORST(share))
  assert not crosses(axes)

  diverged = curves | {"c": learning(3.0, broken=True)}
  axes = figure_of(monkeypatch, draw_learning_curves, diverged).axes[0]
  (cross,) = crosses(axes)
  assert cross.get_xdata() == [100]
  np.testing.assert_array_equal(cross.get_color(), BEST_TO_WORST(1.0))
  assert "diverged" in [text.get_text() for text in axes.get_legend().get_texts()]


def test_a_label_has_the_last_loss_where_its_line_points(monkeypatch):
  rises = evaluated(3.0, 1.0, 2.0)
  falls = evaluated(3.0, 2.0, 1.5)
  axes = figure_of(monkeypatch, draw_learning_curves, {"a": rises, "b": falls}).axes[0]
  found = {label.get_text(): label.xy for label in axes.texts}
  assert found == {"1. a  2.000 (best 1.000)": (2.0, 2.0), "2. b  1.500": (2.0, 1.5)}
  assert [tick for tick in axes.get_xticks() if 0 <= tick <= 2] == [0, 1, 2]


def test_leaders_are_level_inside_the_plot_and_unlike_curves(monkeypatch):
  curves = {"a": learning(1.0), "b": learning(1.2), "early": learning(1.1, steps=50)}
  axes = figure_of(monkeypatch, draw_learning_curves, curves).axes[0]
  leaders = [line for line in axes.lines if line.get_transform() == axes.transAxes]
  assert len(leaders) == 3
  for leader in leaders:
    x, y = leader.get_data()
    assert x[1] == 1  # the edge of the plot
    assert y[0] == y[1]
    assert (leader.get_color(), leader.get_linestyle()) == (GRAY, ":")
  assert sum(leader.get_xdata()[0] < 0.6 for leader in leaders) == 1
  found = [label.get_text() for label in axes.texts]
  assert [text.startswith("3. early") and text.endswith(" at step 50") for text in found][2]


def test_as_many_members_are_labelled_as_fit(monkeypatch):
  for number, labelled in ((12, 12), (40, NUM_LABELLED + 1)):
    curves = {f"m{i}": learning(1 + i / 10) for i in range(number)}
    figure = figure_of(monkeypatch, draw_learning_curves, curves)
    assert len(figure.axes[0].texts) == labelled
    assert len(figure.axes) == 1 + (number > labelled)  # the color bar
    assert any(f"m{number - 1} " in label.get_text() for label in figure.axes[0].texts)


def test_a_member_with_a_single_loss_is_visible_in_a_crowd(monkeypatch):
  curves = {f"m{i}": learning(1 + i / 10) for i in range(CROWD)}
  curves["single"] = learning(0.5, steps=0)
  axes = figure_of(monkeypatch, draw_learning_curves, curves).axes[0]
  single = [line for line in axes.lines if len(line.get_xdata()) == 1]
  assert any(line.get_marker() == "o" and line.get_xdata() == [0] for line in single)


def test_colors_depend_on_rank_not_on_order(monkeypatch):
  curves = {f"m{i}": learning(1 + i / 10) for i in range(8)}
  backwards = dict(reversed(curves.items()))
  colors = []
  for members in (curves, backwards):
    axes = figure_of(monkeypatch, draw_learning_curves, members).axes[0]
    colors.append({label.get_text(): tuple(label.get_color()) for label in axes.texts})
  assert len(colors[0]) == 8
  assert colors[0] == colors[1]


def test_a_spike_does_not_hide_the_other_members(monkeypatch):
  calm = {"a": learning(1.0), "b": learning(1.5)}
  spike = learning(1.2)
  spike[-1] = {"step": 100, "loss": 1e9, "eval_loss": 1e9}
  heights = []
  for rows in (spike, spike[:-1]):
    axes = figure_of(monkeypatch, draw_learning_curves, calm | {"c": rows}).axes[0]
    best = held_out_curves(axes)[0]
    to_fraction = axes.transData + axes.transAxes.inverted()
    heights.append(np.ptp(to_fraction.transform(best.get_xydata())[:, 1]))
  assert heights[0] > 0.7 * heights[1]


@pytest.mark.parametrize(
  "heights",
  [[], [0.5], [0.1] * 6, [1.0] * 6, [0.0, 0.02, 0.5, 0.51, 0.99, 1.0], [0.9, 0.1, 0.9, 0.95]],
  ids=str,
)
def test_labels_do_not_overlap_and_keep_their_order(heights):
  placed = np.asarray(spread(heights, 0.1))
  order = np.argsort(heights, kind="stable")
  assert np.all(np.diff(placed[order]) >= 0.1 - 1e-9)
  assert np.all((placed >= 0) & (placed <= 1))
  assert spread([0.2, 0.9, 0.5], 0.1) == pytest.approx([0.2, 0.9, 0.5])


@pytest.mark.parametrize(
  "curves",
  [
    {},
    {"a": []},
    {"a": [{"step": 0, "loss": None}], "b": [{"step": 0, "loss": math.nan, "eval_loss": None}]},
    {"a": [{"step": 0, "loss": 2.0}]},
    {"a": learning(0.0001), "b": [{"step": 0, "loss": 0.0}], "a long name " * 9: learning(-1)},
    {f"member {i}": learning(1 + i / 64, broken=i % 9 == 0) for i in range(64)},
  ],
  ids=len,
)
def test_edge_cases_of_curves_are_drawn(tmp_path, curves):
  draw_learning_curves(curves, tmp_path / "plot.png")
  assert [path.name for path in tmp_path.iterdir()] == ["plot.png"]
  assert imread(tmp_path / "plot.png").ndim == 3
