"""The curves of a run and its experts' loads as pictures, drawn from the files of its rows."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogFormatter, MaxNLocator

from maxlite.metrics.writers import read_rows

MAX_LAYERS, MAX_STEPS = 16, 400  # of the experts' map: more would not be seen
MAX_LOAD = 3  # times an even share, where the map's colours end
BLUE, ORANGE, GRAY = "#2a6fbb", "#d95f02", "#555555"


class Panel(NamedTuple):
  """One small plot below the loss, drawn where a run has the metric."""

  metric: str
  title: str
  log_scale: bool = False
  from_zero: bool = False


PANELS = (
  Panel("learning_rate", "learning rate"),
  Panel("grad_norm", "gradient norm", log_scale=True),
  Panel("tokens_per_second_per_device", "tokens / s / device", from_zero=True),
  Panel("expert_imbalance", "largest / mean expert load"),
)


def draw_curves(metrics_path: Path, png_path: Path) -> None:
  """Draws training and held-out loss, and below them the panels the run has metrics for."""
  rows = read_rows(metrics_path)
  panels = [panel for panel in PANELS if curve(rows, panel.metric)[0].size]
  layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
  figure = Figure(figsize=(10, 6.2 if panels else 4), layout=layout, dpi=150)
  grid = figure.add_gridspec(
    2 if panels else 1, max(len(panels), 1), height_ratios=[2, 1][: 2 if panels else 1]
  )
  _draw_loss(figure.add_subplot(grid[0, :]), rows)
  for column, panel in enumerate(panels):
    _draw_panel(figure.add_subplot(grid[1, column]), rows, panel)
  save(figure, png_path)


def draw_expert_load(load_path: Path, png_path: Path) -> None:
  """Draws, for each MoE layer, the load of every expert over the steps; nothing without rows.

  Of many layers or steps a part is drawn, evenly chosen.
  """
  rows = read_rows(load_path)
  if not rows:
    return
  rows = [rows[i] for i in _evenly(len(rows), MAX_STEPS)]
  steps = np.asarray([row["step"] for row in rows])
  num_layers = len(rows[0]["expert_load"])
  layers = _evenly(num_layers, MAX_LAYERS)
  columns = min(math.ceil(math.sqrt(len(layers))), 4)
  lines = math.ceil(len(layers) / columns)
  layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08)
  figure = Figure(figsize=(1.5 + 3.2 * columns, 0.5 + 2.3 * lines), layout=layout, dpi=150)
  panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
  for axes in panels.flat[len(layers) :]:
    axes.set_visible(False)
  for axes, layer in zip(panels.flat, layers, strict=False):
    load_SE = np.asarray([row["expert_load"][layer] for row in rows], np.float64)
    mesh = _draw_load(axes, steps, load_SE)
    axes.set_title(f"MoE layer {layer + 1} of {num_layers}", fontsize=9, color=GRAY)
  figure.supxlabel("step", fontsize=10)
  figure.supylabel("expert", fontsize=10)
  bar = figure.colorbar(mesh, ax=panels, extend="max", aspect=30 * lines / 2)
  bar.set_label("tokens / even share", fontsize=9)
  bar.set_ticks(list(range(MAX_LOAD + 1)))
  bar.ax.tick_params(labelsize=8)
  save(figure, png_path)


def _evenly(number: int, limit: int) -> list[int]:
  """At most `limit` of the indices below `number`, the first and the last among them."""
  return np.unique(np.linspace(0, number - 1, min(number, limit)).round().astype(int)).tolist()


def _draw_load(axes: Axes, steps: np.ndarray, load_SE: np.ndarray) -> QuadMesh:
  """One layer's map: blue where an expert has less than its even share, red where more."""
  mean_S1 = load_SE.mean(axis=1, keepdims=True)
  relative_ES = (load_SE / np.where(mean_S1 > 0, mean_S1, np.nan)).T
  between = (steps[1:] + steps[:-1]) / 2
  left = steps[0] - (between[0] - steps[0] if between.size else 0.5)
  right = steps[-1] + (steps[-1] - between[-1] if between.size else 0.5)
  edges = np.concatenate([[left], between, [right]])
  mesh = axes.pcolormesh(
    edges,
    np.arange(load_SE.shape[1] + 1) - 0.5,
    relative_ES,
    cmap="RdBu_r",
    norm=TwoSlopeNorm(1, 0, MAX_LOAD),
    rasterized=True,
  )
  for axis in (axes.xaxis, axes.yaxis):
    axis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
  axes.tick_params(labelsize=8)
  return mesh


def save(figure: Figure, png_path: Path) -> None:
  unfinished = png_path.with_name(f".{png_path.name}")
  figure.savefig(unfinished, format="png")
  unfinished.replace(png_path)


def _draw_loss(axes: Axes, rows: Sequence[dict]) -> None:
  steps, loss = curve(rows, "loss")
  axes.plot(steps, loss, color=BLUE, linewidth=1.2, label="training")
  steps, loss = curve(rows, "eval_loss")
  if steps.size:
    label = f"held out (last: {loss[-1]:.3f})"
    axes.plot(steps, loss, color=ORANGE, marker="o", markersize=4, linewidth=1.5, label=label)
  _, bits = curve(rows, "eval_bits_per_byte")
  if bits.size and 0 < bits[-1] < np.inf and 0 < loss[-1] < np.inf:
    # Both count the same text, so they differ by a factor: a second scale, not a second curve.
    factor = bits[-1] / loss[-1]
    right = axes.secondary_yaxis("right", functions=(lambda y: y * factor, lambda y: y / factor))
    right.set_ylabel("bits per byte (held out)")
    right.tick_params(labelsize=8)
  axes.set_xlabel("step")
  axes.set_ylabel("loss (nats per token)")
  axes.legend(frameon=False)
  tidy(axes)


def _draw_panel(axes: Axes, rows: Sequence[dict], panel: Panel) -> None:
  steps, values = curve(rows, panel.metric)
  axes.plot(steps, values, color=BLUE, linewidth=1.2)
  if panel.log_scale:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
  if panel.from_zero:
    axes.set_ylim(bottom=0)
  axes.set_title(panel.title, fontsize=9, color=GRAY)
  axes.set_xlabel("step")
  tidy(axes)


def curve(rows: Sequence[dict], metric: str) -> tuple[np.ndarray, np.ndarray]:
  """(steps, values) of the rows that have the metric; null is a gap in the curve."""
  points = [(row["step"], row[metric]) for row in rows if metric in row]
  steps, values = np.asarray(points, np.float64).reshape(-1, 2).T
  return steps, values


def tidy(axes: Axes) -> None:
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(alpha=0.25, linewidth=0.6)
  axes.tick_params(which="both", labelsize=8)
