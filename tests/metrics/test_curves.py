"""Plots of a run show what its metrics file has."""

import itertools
import json
import math

import numpy as np
import pytest
from matplotlib.image import imread

from maxlite.metrics.plots import curves
from maxlite.metrics.plots.curves import draw_curves, draw_expert_load
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


def draw(folder, rows):
  writer = JsonlWriter(folder / "metrics.jsonl", -1)
  for row in rows:
    writer.write(row)
  writer.close()
  draw_curves(folder / "metrics.jsonl", folder / "curves.png")
  assert sorted(path.name for path in folder.iterdir()) == ["curves.png", "metrics.jsonl"]
  return imread(folder / "curves.png")


def test_every_metric_adds_to_the_plot(tmp_path):
  rows = [training_row(step) for step in range(0, 301, 5)]
  rows += [eval_row(step) for step in (0, 100, 200, 300)]
  pictures = []
  for i, metric in enumerate([None, "eval_bits_per_byte", "eval_loss", "expert_imbalance"]):
    rows = [{name: value for name, value in row.items() if name != metric} for row in rows]
    folder = tmp_path / str(i)
    folder.mkdir()
    pictures.append(draw(folder, [row for row in rows if len(row) > 1]))
  for more, fewer in itertools.pairwise(pictures):
    assert not np.array_equal(more, fewer)


def test_ticks_are_whole_steps(tmp_path, monkeypatch):
  figures = []
  monkeypatch.setattr(curves, "save_figure", lambda figure, _: figures.append(figure))
  rows = [training_row(step) | eval_row(step) for step in range(4)]
  (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
  draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png")
  for axes in figures[0].axes:
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
  assert draw(tmp_path, rows).ndim == 3


def draw_load(folder, steps, load_SNE):
  """The plot, or None if none was drawn."""
  folder.mkdir()
  writer = JsonlWriter(folder / "expert_load.jsonl", -1)
  for step, load_NE in zip(steps, load_SNE, strict=True):
    writer.write({"step": step, "expert_load": np.asarray(load_NE).tolist()})
  writer.close()
  draw_expert_load(folder / "expert_load.jsonl", folder / "expert_load.png")
  png = folder / "expert_load.png"
  return imread(png) if png.exists() else None


def reds(picture):
  """Number of pixels with the color of an overloaded expert."""
  red, green, blue = (picture[..., i] for i in range(3))
  return int(((red > 0.35) & (green < 0.1) & (blue < 0.2)).sum())


def test_an_overloaded_expert_is_red_while_overloaded(tmp_path):
  even, overloaded = np.full((2, 8), 10), np.full((2, 8), 10)
  overloaded[1, 5] = 200
  loads = {"never": [even] * 8, "half": [even] * 4 + [overloaded] * 4, "always": [overloaded] * 8}
  pictures = {n: draw_load(tmp_path / n, range(0, 80, 10), load) for n, load in loads.items()}
  never, half, always = (reds(pictures[name]) for name in loads)
  assert always - never == pytest.approx(2 * (half - never), rel=0.05)
  assert half - never > 500


@pytest.mark.parametrize(
  ("steps", "ticks"),
  [([1], [1]), ([1, 2, 3], [1, 2, 3]), ([1, *range(10, 101, 10)], [1, 20, 40, 60, 80, 100])],
  ids=str,
)
def test_ticks_of_loads_are_logged_steps(tmp_path, monkeypatch, steps, ticks):
  figures = []
  monkeypatch.setattr(curves, "save_figure", lambda figure, _: figures.append(figure))
  draw_load(tmp_path / "run", steps, [[[3, 1]]] * len(steps))
  assert figures[0].axes[0].get_xticks().tolist() == ticks


def test_number_of_layers_and_steps_is_limited(tmp_path):
  load_SNE = np.random.default_rng(0).integers(1, 9, (1000, 40, 3))
  picture = draw_load(tmp_path / "many", range(1000), load_SNE)
  few = draw_load(tmp_path / "few", range(1000), load_SNE[:, :16])
  assert picture.shape == few.shape


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
  picture = draw_load(tmp_path / "run", steps, load_SNE)
  assert (picture is None) == (not steps)
