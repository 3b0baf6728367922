"""Plots of an ensemble show ranks and divergence, and edge cases are drawn without a warning."""

import math

import numpy as np
import pytest
from matplotlib.image import imread

from maxlite.metrics.plots import ensemble_curves
from maxlite.metrics.plots.ensemble_curves import (
  BEST_TO_WORST,
  CROWD,
  METHOD_COLORS,
  NOT_USED,
  NUM_LABELLED,
  draw_calibration,
  draw_learning_curves,
  draw_parallel_coordinates,
  scale_of,
  spread,
)
from maxlite.metrics.plots.figure import GRAY


def plot(folder, draw, *arguments):
  folder.mkdir(exist_ok=True)
  draw(*arguments, folder / "plot.png")
  assert [path.name for path in folder.iterdir()] == ["plot.png"]
  return imread(folder / "plot.png")[..., :3]


def count(image, color):
  """Number of pixels of the RGB color."""
  return int((np.abs(image - np.asarray(color)[:3]).max(axis=-1) < 0.02).sum())


def learning(floor, steps=100, broken=False):
  rows = []
  for step in range(0, steps + 1, 10):
    loss = 4 * math.exp(-step / 30) + floor
    rows.append({"step": step, "loss": loss, "eval_loss": loss + 0.1})
  return [*rows, {"step": steps + 10, "loss": None}] if broken else rows


def test_learning_curves_show_ranks_divergence_and_members(tmp_path):
  curves = {"a": learning(1.0), "b": learning(2.0), "c": learning(3.0)}
  draw = lambda name, curves: plot(tmp_path / name, draw_learning_curves, curves)
  whole = draw("whole", curves)
  assert count(whole, BEST_TO_WORST(0.0)) > 200
  assert count(whole, BEST_TO_WORST(1.0)) > 200
  changed = {
    "fewer": {"a": curves["a"], "b": curves["b"]},
    "diverged": curves | {"c": learning(3.0, broken=True)},
    "stopped": curves | {"c": learning(3.0, steps=50)},
    "not trained": curves | {"c": [row for row in curves["c"] if row["step"] == 0]},
    "renamed": {"d": curves["a"], "b": curves["b"], "c": curves["c"]},
  }
  for name, others in changed.items():
    drawn = draw(name, others)
    assert not np.array_equal(drawn, whole), name
    if name == "diverged":  # the cross, in the member's color
      assert count(drawn, BEST_TO_WORST(1.0)) > count(whole, BEST_TO_WORST(1.0)) + 20


def figure_of(monkeypatch, draw, *arguments):
  figures = []
  monkeypatch.setattr(ensemble_curves, "save_figure", lambda figure, _: figures.append(figure))
  draw(*arguments, None)
  return figures[0]


def test_a_label_has_the_last_loss_where_its_line_points(monkeypatch):
  rises = [{"step": s, "eval_loss": loss} for s, loss in ((0, 3.0), (1, 1.0), (2, 2.0))]
  falls = [{"step": s, "eval_loss": loss} for s, loss in ((0, 3.0), (1, 2.0), (2, 1.5))]
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


def test_a_member_with_a_single_loss_is_visible_in_a_crowd(tmp_path):
  curves = {f"m{i}": learning(1 + i / 10) for i in range(CROWD)}
  drawn, without = (
    plot(tmp_path, draw_learning_curves, curves | {"single": single})
    for single in (learning(0.5, steps=0), [])
  )
  worst = BEST_TO_WORST(1.0)[:3]
  half = drawn.shape[1] // 2  # without its label and the color bar
  marker, nothing = (count(image[:, :half], worst) for image in (drawn, without))
  assert marker > nothing + 10


def test_colors_depend_on_rank_not_on_order(tmp_path):
  curves = {f"m{i}": learning(1 + i / 10) for i in range(8)}
  backwards = dict(reversed(curves.items()))
  first, second = (
    plot(tmp_path / name, draw_learning_curves, c)
    for name, c in (("one", curves), ("other", backwards))
  )
  np.testing.assert_array_equal(first, second)


def test_a_spike_does_not_hide_the_other_members(tmp_path):
  calm = {"a": learning(1.0), "b": learning(1.5)}
  spike = learning(1.2)
  spike[-1] = {"step": 100, "loss": 1e9, "eval_loss": 1e9}
  best = BEST_TO_WORST(0.0)[:3]
  heights = []
  for rows in (spike, spike[:-1]):
    drawn = plot(tmp_path, draw_learning_curves, calm | {"c": rows})
    heights.append(np.ptp(np.nonzero(np.abs(drawn - best).max(axis=-1) < 0.02)[0]))
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


def test_a_large_range_has_a_log_scale():
  assert scale_of([0.1, 0.001, 0.01]).heights == pytest.approx([1, 0, 0.5])
  assert scale_of([1, 5, 9]).heights == pytest.approx([0, 0.5, 1])
  assert scale_of([0, 50, 100]).heights == pytest.approx([0, 0.5, 1])
  assert scale_of([-100, 0, 100]).heights == pytest.approx([0, 0.5, 1])
  assert scale_of([3, 3]).heights == [0.5, 0.5]


def test_a_member_without_a_key_is_below_its_axis(monkeypatch):
  found = scale_of([8, None, 4])
  assert found.heights == [1, NOT_USED, 0]
  assert found.ticks == [(NOT_USED, "not used"), (0, "4"), (1, "8")]
  assert scale_of([None, "a", "b"]).heights == [NOT_USED, 0, 1]
  rows = [{"num_experts": 8, "best_loss": 1.0}, {"best_loss": 2.0}]
  axes = figure_of(monkeypatch, draw_parallel_coordinates, rows, ["num_experts"]).axes[0]
  starts = [patch.get_path().vertices[0, 1] for patch in axes.patches]
  assert sorted(starts) == [NOT_USED, 0.5]
  assert axes.get_ylim()[0] < NOT_USED


def test_names_are_evenly_spaced():
  found = scale_of(["llama", "olmoe", "mixtral", "olmoe"])
  assert found.heights == [0, 0.5, 1, 0.5]
  assert found.ticks == [(0, "llama"), (0.5, "olmoe"), (1, "mixtral")]
  assert scale_of([False, True]).ticks == [(0, "false"), (1, "true")]
  assert scale_of(["llama"]).heights == [0.5]


@pytest.mark.parametrize("values", [range(1, 65), np.geomspace(1e-4, 0.3, 64), [64, 65, 66, 4096]])
def test_ticks_match_their_values_and_do_not_overlap(values):
  found = scale_of(list(map(float, values)))
  heights = [height for height, _ in found.ticks]
  assert (heights[0], heights[-1]) == (0, 1)
  assert np.all(np.diff(heights) > 0.03)
  drawn = np.interp([float(label) for _, label in found.ticks], values, found.heights)
  np.testing.assert_allclose(drawn, heights, atol=0.01)


def test_the_best_member_is_drawn_on_top(tmp_path):
  rows = [{"depth": 1, "width": 8, "best_loss": loss} for loss in (3.0, 1.0, 2.0)]
  for name, members in {"one": rows, "other": rows[::-1]}.items():
    drawn = plot(tmp_path / name, draw_parallel_coordinates, members, ["depth", "width"])
    between = drawn[:, drawn.shape[1] // 5 : drawn.shape[1] // 3]  # where their lines coincide
    best, worst = (np.abs(between - BEST_TO_WORST(x)[:3]).max(axis=-1) for x in (0.0, 1.0))
    assert (best < 0.2).sum() > 100
    assert not (worst < 0.2).any()


def test_each_key_has_an_axis_and_each_member_a_line(tmp_path):
  rows = [
    {"learning_rate": 10.0**-i, "decoder_block": kind, "best_loss": 2 + i / 10}
    for i, kind in enumerate(["llama", "mixtral", "llama"])
  ]
  draw = lambda rows, keys: plot(tmp_path, draw_parallel_coordinates, rows, keys)
  both = draw(rows, ["learning_rate", "decoder_block"])
  assert both.shape[1] > draw(rows, ["learning_rate"]).shape[1]
  lost = [rows[0], rows[1], rows[2] | {"best_loss": None}]
  for others in (rows[:2], lost):
    assert not np.array_equal(draw(others, ["learning_rate", "decoder_block"]), both)


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
  many, few = bins(0.5, 0.4, weight=1000.0), bins(0.9, 0.0, weight=3.0)
  method = {key: many[key] + few[key] for key in many}
  above, below = figure_of(monkeypatch, draw_calibration, {"one": method}).axes
  _, curve = above.lines
  np.testing.assert_allclose(np.transpose(curve.get_data()), [(0.5, 0.4)])
  assert (below.patches[0].get_data().values > 0).sum() == 2


def test_overconfidence_is_below_the_diagonal(tmp_path):
  blue = tuple(int(METHOD_COLORS[0][i : i + 2], 16) / 255 for i in (1, 3, 5))
  rows = {}
  for accuracy in (0.1, 0.9):
    drawn = plot(tmp_path, draw_calibration, {"one": bins(0.9, accuracy)})
    above = drawn[: int(0.68 * len(drawn)), drawn.shape[1] // 2 :]
    rows[accuracy] = np.mean(np.nonzero(np.abs(above - blue).max(axis=-1) < 0.05)[0])
  assert rows[0.1] > rows[0.9] + 300


def test_the_legend_of_calibration_covers_no_curve(monkeypatch):
  methods = {name: bins(0.9, 0.5) for name in ("mean of probabilities", "best member", "vote")}
  figure = figure_of(monkeypatch, draw_calibration, methods)
  figure.draw_without_rendering()
  legend = figure.legends[0].get_window_extent()
  assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)


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
  assert plot(tmp_path, draw_learning_curves, curves).ndim == 3


@pytest.mark.parametrize(
  ("rows", "keys"),
  [
    ([], ["depth"]),
    ([{"best_loss": 1.0}], []),
    ([{"depth": 1, "best_loss": None}, {"depth": 2, "best_loss": math.nan}], ["depth"]),
    ([{"save": ("a", "b"), "best_loss": 0.0}, {"save": (), "best_loss": 1.0}], ["save"]),
  ],
  ids=str,
)
def test_edge_cases_of_sweeps_are_drawn(tmp_path, rows, keys):
  assert plot(tmp_path, draw_parallel_coordinates, rows, keys).ndim == 3


@pytest.mark.parametrize(
  "methods",
  [{}, {"empty": bins(0.5, 0.5, weight=0)}, {f"method {i}": bins(i / 8, 0.5) for i in range(8)}],
  ids=len,
)
def test_edge_cases_of_calibration_are_drawn(tmp_path, methods):
  assert plot(tmp_path, draw_calibration, methods).ndim == 3
