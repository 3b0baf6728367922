"""Parallel coordinates have an axis per key and a line per member."""

import math

import numpy as np
import pytest
from drawn_figures import figure_of
from matplotlib.image import imread

from maxlite.metrics.plots.figure import BEST_TO_WORST
from maxlite.metrics.plots.parallel_coordinates import (
  NOT_USED,
  draw_parallel_coordinates,
  scale_of,
)


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
  found = scale_of([float(value) for value in values])
  heights = [height for height, _ in found.ticks]
  assert (heights[0], heights[-1]) == (0, 1)
  assert np.all(np.diff(heights) > 0.03)
  drawn = np.interp([float(label) for _, label in found.ticks], values, found.heights)
  np.testing.assert_allclose(drawn, heights, atol=0.01)


def test_the_best_member_is_drawn_on_top(monkeypatch):
  rows = [{"depth": 1, "width": 8, "best_loss": loss} for loss in (3.0, 1.0, 2.0)]
  for members in (rows, rows[::-1]):
    axes = figure_of(monkeypatch, draw_parallel_coordinates, members, ["depth", "width"]).axes[0]
    worst, _, best = sorted(axes.patches, key=lambda patch: patch.get_zorder())
    np.testing.assert_allclose(best.get_edgecolor()[:3], BEST_TO_WORST(0.0)[:3])
    np.testing.assert_allclose(worst.get_edgecolor()[:3], BEST_TO_WORST(1.0)[:3])


def test_each_key_has_an_axis_and_each_member_a_line(monkeypatch):
  rows = [
    {"learning_rate": 1e0, "decoder_block": "llama", "best_loss": 2.0},
    {"learning_rate": 1e-1, "decoder_block": "mixtral", "best_loss": 2.1},
    {"learning_rate": 1e-2, "decoder_block": "llama", "best_loss": 2.2},
  ]
  keys = ["learning_rate", "decoder_block"]
  both = figure_of(monkeypatch, draw_parallel_coordinates, rows, keys)
  one = figure_of(monkeypatch, draw_parallel_coordinates, rows, keys[:1])
  assert both.get_figwidth() > one.get_figwidth()
  titles = {text.get_text() for text in both.axes[0].texts}
  assert {*keys, "best loss"} <= titles
  assert [patch.get_linestyle() for patch in both.axes[0].patches] == ["-", "-", "-"]
  lost = [rows[0], rows[1], rows[2] | {"best_loss": None}]
  axes = figure_of(monkeypatch, draw_parallel_coordinates, lost, keys).axes[0]
  styles = [patch.get_linestyle() for patch in axes.patches]
  assert sorted(styles) == ["-", "-", ":"]
  ends = [patch.get_path().vertices[-1, 0] for patch in axes.patches]
  assert sorted(ends) == [1, 2, 2]  # the dotted line ends before the last axis
  assert "dotted: no finite loss" in {text.get_text() for text in axes.texts}


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
  draw_parallel_coordinates(rows, keys, tmp_path / "plot.png")
  assert imread(tmp_path / "plot.png").ndim == 3
