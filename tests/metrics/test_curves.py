"""Plots of a run show what its metrics file has."""

import math

import numpy as np
import pytest
from drawn_figures import figures_of
from matplotlib.image import imread

from maxlite.metrics.plots.curves import (
  MAX_LAYERS,
  MAX_STEPS,
  PANELS,
  draw_curves,
  draw_expert_load,
)
from maxlite.metrics.writers import JsonlWriter


def training_row(step):
  noise = np.random.default_rng(step).normal()
  return {
    "step": step,
    "loss": 5.8 * math.exp(-step / 60) + 1.6 + 0.03 * noise,
    "learning_rate": 2e-3 * min(step / 30, 0.55 + 0.45 * math.cos(math.pi * step / 300)),
    "grad_norm": (0.6 + 3 * math.exp(-step / 20)) * math.exp(0.15 * noise),
    "tokens_per_second_per_device": 5200 + 80 * noise,
    "expert_imbalance": 1.2 + 1.5 * math.exp(-step / 50) + 0.03 * noise,
  }


def eval_row(step):
  loss = 5.8 * math.exp(-step / 60) + 1.7
  return {"step": step, "eval_loss": loss, "eval_bits_per_byte": loss / math.log(2)}


def write(path, rows):
  writer = JsonlWriter(path, -1)
  for row in rows:
    writer.write(row)
  writer.close()


def figure_of_rows(monkeypatch, folder, rows):
  write(folder / "metrics.jsonl", rows)
  (figure,) = figures_of(monkeypatch, draw_curves, folder / "metrics.jsonl", None)
  return figure


def test_every_metric_adds_to_the_plot(tmp_path, monkeypatch):
  rows = [training_row(step) for step in range(0, 301, 5)]
  rows += [eval_row(step) for step in (0, 100, 200, 300)]
  figure = figure_of_rows(monkeypatch, tmp_path, rows)
  loss, *panels = figure.axes
  assert [line.get_label() for line in loss.lines] == ["training", "held out (last: 1.739)"]
  assert [axes.get_ylabel() for axes in loss.child_axes] == ["bits per byte (held out)"]
  assert [axes.get_title() for axes in panels] == [panel.title for panel in PANELS]

  (tmp_path / "fewer").mkdir()
  for row in rows:
    row.pop("eval_bits_per_byte", None)
    row.pop("expert_imbalance", None)
  loss, *panels = figure_of_rows(monkeypatch, tmp_path / "fewer", rows).axes
  assert not loss.child_axes
  assert len(panels) == len(PANELS) - 1


def test_ticks_are_whole_steps(tmp_path, monkeypatch):
  rows = [training_row(step) | eval_row(step) for step in range(4)]
  for axes in figure_of_rows(monkeypatch, tmp_path, rows).axes:
    assert [tick for tick in axes.get_xticks() if 0 <= tick <= 3] == [0, 1, 2, 3]


@pytest.mark.parametrize(
  "rows",
  [
    [],
    [{"step": 0, "loss": 2.0}],
    [{"step": 0, "loss": math.nan, "grad_norm": math.nan}],
    [{"step": 0, "eval_loss": 0.0, "eval_bits_per_byte": 0.0}],
    [{"step": 1, "loss": 2.0, "grad_norm": 0.0}, {"step": 2, "loss": math.inf, "grad_norm": 1.0}],
  ],
)
def test_edge_cases_are_drawn_without_a_warning(tmp_path, rows):
  write(tmp_path / "metrics.jsonl", rows)
  draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
  assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "metrics.jsonl"]
  assert imread(tmp_path / "curves.png").ndim == 3


def write_load(path, steps, load_SNE):
  rows = []
  for step, load_NE in zip(steps, load_SNE, strict=True):
    rows.append({"step": step, "expert_load": np.asarray(load_NE).tolist()})
  write(path, rows)


def figures_of_load(monkeypatch, folder, steps, load_SNE):
  write_load(folder / "expert_load.jsonl", steps, load_SNE)
  return figures_of(monkeypatch, draw_expert_load, folder / "expert_load.jsonl", None)


def test_an_overloaded_expert_is_red_while_overloaded(tmp_path, monkeypatch):
  even = np.full((2, 8), 10)
  overloaded = np.full((2, 8), 10)
  overloaded[1, 5] = 200
  load_SNE = [even] * 4 + [overloaded] * 4
  (figure,) = figures_of_load(monkeypatch, tmp_path, range(0, 80, 10), load_SNE)
  first, second = (axes.collections[0] for axes in figure.axes[:2])
  np.testing.assert_allclose(first.get_array(), 1)
  expected_ES = np.ones((8, 8))
  expected_ES[:, 4:] = 10 / (270 / 8)
  expected_ES[5, 4:] = 200 / (270 / 8)
  np.testing.assert_allclose(second.get_array(), expected_ES)
  red, green, blue, _ = second.cmap(second.norm(expected_ES[5, 4]))
  assert red > 0.35
  assert max(green, blue) < 0.2


@pytest.mark.parametrize(
  ("steps", "ticks"),
  [([1], [1]), ([1, 2, 3], [1, 2, 3]), ([1, *range(10, 101, 10)], [1, 20, 40, 60, 80, 100])],
  ids=str,
)
def test_ticks_of_loads_are_logged_steps(tmp_path, monkeypatch, steps, ticks):
  (figure,) = figures_of_load(monkeypatch, tmp_path, steps, [[[3, 1]]] * len(steps))
  assert figure.axes[0].get_xticks().tolist() == ticks


def test_number_of_layers_and_steps_is_limited(tmp_path, monkeypatch):
  load_SNE = np.random.default_rng(0).integers(1, 9, (1000, 40, 3))
  (figure,) = figures_of_load(monkeypatch, tmp_path, range(1000), load_SNE)
  drawn = [axes.collections[0] for axes in figure.axes if axes.get_title()]
  assert len(drawn) == MAX_LAYERS
  assert drawn[0].get_array().shape == (3, MAX_STEPS)


@pytest.mark.parametrize(
  ("steps", "load_SNE"),
  [
    ([], []),
    ([1], [[[3, 1]]]),
    ([1, 10], [[[0, 0]] * 3, [[5, 0]] * 3]),
    ([1, 2, 50], [[[1]] * 5] * 3),
  ],
  ids=str,
)
def test_edge_cases_of_loads_are_drawn_without_a_warning(tmp_path, steps, load_SNE):
  write_load(tmp_path / "expert_load.jsonl", steps, load_SNE)
  draw_expert_load(tmp_path / "expert_load.jsonl", tmp_path / "expert_load.png")
  assert (tmp_path / "expert_load.png").exists() == bool(steps)
