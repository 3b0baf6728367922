"""The curves of a run as one picture, drawn from its metrics file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogFormatter

from maxlite.observe.writers import read_rows

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
  panels = [panel for panel in PANELS if _curve(rows, panel.metric)[0].size]
  layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
  figure = Figure(figsize=(10, 6.2 if panels else 4), layout=layout, dpi=150)
  grid = figure.add_gridspec(
    2 if panels else 1, max(len(panels), 1), height_ratios=[2, 1][: 2 if panels else 1]
  )
  _draw_loss(figure.add_subplot(grid[0, :]), rows)
  for column, panel in enumerate(panels):
    _draw_panel(figure.add_subplot(grid[1, column]), rows, panel)
  unfinished = png_path.with_name(f".{png_path.name}")
  figure.savefig(unfinished, format="png")
  unfinished.replace(png_path)


def _draw_loss(axes: Axes, rows: Sequence[dict]) -> None:
  steps, loss = _curve(rows, "loss")
  axes.plot(steps, loss, color=BLUE, linewidth=1.2, label="training")
  steps, loss = _curve(rows, "eval_loss")
  if steps.size:
    label = f"held out (last: {loss[-1]:.3f})"
    axes.plot(steps, loss, color=ORANGE, marker="o", markersize=4, linewidth=1.5, label=label)
  _, bits = _curve(rows, "eval_bits_per_byte")
  if bits.size and 0 < bits[-1] < np.inf and 0 < loss[-1] < np.inf:
    # Both count the same text, so they differ by a factor: a second scale, not a second curve.
    factor = bits[-1] / loss[-1]
    right = axes.secondary_yaxis("right", functions=(lambda y: y * factor, lambda y: y / factor))
    right.set_ylabel("bits per byte (held out)")
    right.tick_params(labelsize=8)
  axes.set_xlabel("step")
  axes.set_ylabel("loss (nats per token)")
  axes.legend(frameon=False)
  _tidy(axes)


def _draw_panel(axes: Axes, rows: Sequence[dict], panel: Panel) -> None:
  steps, values = _curve(rows, panel.metric)
  axes.plot(steps, values, color=BLUE, linewidth=1.2)
  if panel.log_scale:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
  if panel.from_zero:
    axes.set_ylim(bottom=0)
  axes.set_title(panel.title, fontsize=9, color=GRAY)
  axes.set_xlabel("step")
  _tidy(axes)


def _curve(rows: Sequence[dict], metric: str) -> tuple[np.ndarray, np.ndarray]:
  """(steps, values) of the rows that have the metric; null is a gap in the curve."""
  points = [(row["step"], row[metric]) for row in rows if metric in row]
  steps, values = np.asarray(points, np.float64).reshape(-1, 2).T
  return steps, values


def _tidy(axes: Axes) -> None:
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(alpha=0.25, linewidth=0.6)
  axes.tick_params(which="both", labelsize=8)
