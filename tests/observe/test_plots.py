"""The picture of a run's curves is drawn from whatever the metrics file has."""

import itertools
import math

import numpy as np
import pytest
from matplotlib.image import imread

from maxlite.observe.plots import draw_curves
from maxlite.observe.writers import JsonlWriter


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


def test_every_metric_adds_to_the_picture(tmp_path):
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
def test_odd_runs_are_drawn_without_a_warning(tmp_path, rows):
  assert draw(tmp_path, rows).ndim == 3
