"""Plots of one run: loss curves, the load of each expert, and phases above their losses."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import TwoSlopeNorm
from matplotlib.ticker import LogFormatter, MaxNLocator

from maxlite.errors import UserError
from maxlite.metrics.plots.figure import (
  BLUE,
  GRAY,
  ORANGE,
  Color,
  curve_of,
  new_figure,
  save_figure,
  style_steps,
)
from maxlite.metrics.step_row import LoggedRow
from maxlite.metrics.writers import EXPERT_LOAD, METRICS, read_rows

# Limits of the plot of expert loads; more would not be visible.
MAX_LAYERS = 16
MAX_STEPS = 400
MAX_TICKS = 6
MAX_LOAD = 3  # upper end of the color scale, in multiples of a uniform load
Span = tuple[int, int, str]  # first step, last step, phase
PHASE_LOSSES = {"loss": ".", "draft_loss": "x"}  # with their markers
MAX_SPAN_LINES = 60  # with more spans, the lines between them would hide the curves


class Panel(NamedTuple):
  """A small plot below the loss, drawn if the run has the metric."""

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
  """Draw training and held-out loss, and below them a panel per metric that the run has."""
  rows = read_rows(metrics_path, METRICS)
  panels = [panel for panel in PANELS if curve_of(rows, panel.metric).size]
  num_columns = max(len(panels), 1)
  if panels:
    figure = new_figure(10, 6.2, w_pad=0.12, h_pad=0.1)
    grid = figure.add_gridspec(2, num_columns, height_ratios=[2, 1])
  else:
    figure = new_figure(10, 4, w_pad=0.12, h_pad=0.1)
    grid = figure.add_gridspec(1, num_columns, height_ratios=[2])
  _draw_loss(figure.add_subplot(grid[0, :]), rows)
  for column, panel in enumerate(panels):
    _draw_panel(figure.add_subplot(grid[1, column]), rows, panel)
  save_figure(figure, png_path)


def draw_expert_load(load_path: Path, png_path: Path) -> None:
  """Draw the load of every expert over the steps for each MoE layer; nothing without rows.

  Draws at most MAX_LAYERS evenly spaced layers and MAX_STEPS evenly spaced steps.
  """
  rows = read_rows(load_path, EXPERT_LOAD)
  if not rows:
    return
  rows = [rows[i] for i in _evenly_spaced(len(rows), MAX_STEPS)]
  steps = np.asarray([row["step"] for row in rows])
  loads = [row["expert_load"] for row in rows]
  try:
    load_SNE = np.asarray(loads, np.float64)
  except ValueError:
    raise UserError(f"{load_path} has rows of different models: move it away") from None
  num_layers = load_SNE.shape[1]
  layers = _evenly_spaced(num_layers, MAX_LAYERS)
  side_of_square = math.ceil(math.sqrt(len(layers)))
  columns = min(side_of_square, 4)
  lines = math.ceil(len(layers) / columns)
  figure = new_figure(1.5 + 3.2 * columns, 0.5 + 2.3 * lines, w_pad=0.08, h_pad=0.08)
  panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
  for axes in panels.flat[len(layers) :]:
    axes.set_visible(False)
  for axes, layer in zip(panels.flat, layers, strict=False):
    mesh = _draw_load(axes, steps, load_SNE[:, layer])
    axes.set_title(f"MoE layer {layer + 1} of {num_layers}", fontsize=9, color=GRAY)
  figure.supxlabel("step", fontsize=10)
  figure.supylabel("expert", fontsize=10)
  bar = figure.colorbar(mesh, ax=panels, extend="max", aspect=30 * lines / 2)
  bar.set_label("tokens / even share", fontsize=9)
  bar.set_ticks(list(range(MAX_LOAD + 1)))
  bar.ax.tick_params(labelsize=8)
  save_figure(figure, png_path)


def _evenly_spaced(number: int, limit: int) -> list[int]:
  """At most `limit` of the indices below `number`, including the first and the last."""
  positions = np.linspace(0, number - 1, min(number, limit))
  indices = np.unique(positions.round().astype(int))
  return indices.tolist()


def _draw_load(axes: Axes, steps: np.ndarray, load_SE: np.ndarray) -> QuadMesh:
  """Draw one layer: blue below a uniform load, red above."""
  mean_S1 = load_SE.mean(axis=1, keepdims=True)
  relative_ES = (load_SE / np.where(mean_S1 > 0, mean_S1, np.nan)).T
  between = (steps[1:] + steps[:-1]) / 2
  first_half = 0.5  # half of the width of the first column
  last_half = 0.5
  if between.size:
    first_half = between[0] - steps[0]
    last_half = steps[-1] - between[-1]
  left = steps[0] - first_half
  right = steps[-1] + last_half
  mesh = axes.pcolormesh(
    np.concatenate([[left], between, [right]]),
    np.arange(load_SE.shape[1] + 1) - 0.5,
    relative_ES,
    cmap="RdBu_r",
    norm=TwoSlopeNorm(1, 0, MAX_LOAD),
    rasterized=True,
  )
  axes.set_xticks(steps[_evenly_spaced(len(steps), MAX_TICKS)])
  axes.yaxis.set_major_locator(MaxNLocator(MAX_TICKS, integer=True, min_n_ticks=1))
  axes.tick_params(labelsize=8)
  return mesh


def _draw_loss(axes: Axes, rows: Sequence[LoggedRow]) -> None:
  """Draw the training and held-out losses, and the loss of each source of held-out data."""
  steps, loss = curve_of(rows, "loss").T
  axes.plot(steps, loss, color=BLUE, linewidth=1.2, label="training")
  eval_steps, eval_loss = curve_of(rows, "eval_loss").T
  if eval_steps.size:
    axes.plot(
      eval_steps,
      eval_loss,
      color=ORANGE,
      marker="o",
      markersize=4,
      linewidth=1.5,
      label=f"held out (last: {eval_loss[-1]:.3f})",
    )
  for name in _source_losses(rows):
    source = name.removeprefix("eval_loss/")
    source_steps, source_loss = curve_of(rows, name).T
    label = f"{source} (last: {source_loss[-1]:.3f})"
    axes.plot(source_steps, source_loss, marker=".", linewidth=0.8, label=label)
  _, bits = curve_of(rows, "eval_bits_per_byte").T
  if bits.size and 0 < bits[-1] < np.inf and 0 < eval_loss[-1] < np.inf:
    _add_bits_per_byte(axes, bits[-1] / eval_loss[-1])
  axes.set_ylabel("loss (nats per token)")
  axes.legend(frameon=False)
  style_steps(axes)


def _source_losses(rows: Sequence[LoggedRow]) -> list[str]:
  """The metrics of the held-out losses of single sources."""
  names: set[str] = set()
  for row in rows:
    names.update(name for name in row if name.startswith("eval_loss/"))
  return sorted(names)


def _add_bits_per_byte(axes: Axes, factor: float) -> None:
  """Add an axis of bits per byte, which are `factor` times the loss.

  Both measure the same text and differ by a constant factor: a second scale is enough.
  """
  functions = (lambda loss: loss * factor, lambda bits: bits / factor)
  right = axes.secondary_yaxis("right", functions=functions)
  right.set_ylabel("bits per byte (held out)")
  right.tick_params(labelsize=8)


def _draw_panel(axes: Axes, rows: Sequence[LoggedRow], panel: Panel) -> None:
  steps, values = curve_of(rows, panel.metric).T
  axes.plot(steps, values, color=BLUE, linewidth=1.2)
  if panel.log_scale:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
  if panel.from_zero:
    axes.set_ylim(bottom=0)
  axes.set_title(panel.title, fontsize=9, color=GRAY)
  style_steps(axes)


def draw_timeline(
  metrics_path: Path,
  png_path: Path,
  groups: Mapping[str, Sequence[str]],
  spans: Sequence[Span],
) -> None:
  """Draw when each group of parameters is trained, coloured by phase, and the losses below.

  Args:
    metrics_path: the file of the run's rows.
    png_path: where the plot is saved.
    groups: phase -> regexes of the parameters it trains.
    spans: the steps of each phase, in order.
  """
  regexes: list[str] = []
  for trained in groups.values():
    for regex in trained:
      if regex not in regexes:
        regexes.append(regex)
  height = 0.8 + 0.32 * len(regexes)
  figure = new_figure(10, height + 3.6, w_pad=0.12, h_pad=0.08)
  top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[height, 3.2])
  palette = colormaps["tab10"]
  colors: dict[str, Color] = {}
  for index, phase in enumerate(groups):
    colors[phase] = palette(index % palette.N)
  _draw_groups(top, regexes, groups, spans, colors)
  _draw_phase_losses(bottom, read_rows(metrics_path, METRICS), spans, colors)
  save_figure(figure, png_path)


def _draw_groups(
  axes: Axes,
  regexes: Sequence[str],
  groups: Mapping[str, Sequence[str]],
  spans: Sequence[Span],
  colors: Mapping[str, Color],
) -> None:
  """Draw a line of bars per regex: the steps in which a phase trains its parameters."""
  for line, regex in enumerate(regexes):
    for phase, trained in groups.items():
      if regex in trained:
        bars: list[tuple[float, float]] = []  # left edge, width
        for first, last, phase_of_span in spans:
          if phase_of_span == phase:
            bars.append((first - 0.5, last - first + 1))
        axes.broken_barh(bars, (line - 0.38, 0.76), color=colors[phase], label=phase)
  axes.set_yticks(range(len(regexes)), regexes, fontsize=8)
  axes.set_ylim(len(regexes) - 0.5, -0.5)
  axes.set_title("trained parameters by phase", fontsize=9, color=GRAY)
  handles, labels = axes.get_legend_handles_labels()
  handle_of = dict(zip(labels, handles, strict=True))  # one of each phase
  axes.legend(
    handle_of.values(),
    handle_of.keys(),
    frameon=False,
    loc="upper left",
    bbox_to_anchor=(1, 1),
  )
  axes.spines[["top", "right"]].set_visible(False)


def _draw_phase_losses(
  axes: Axes,
  rows: Sequence[LoggedRow],
  spans: Sequence[Span],
  colors: Mapping[str, Color],
) -> None:
  """Draw a line of each phase: losses of different phases are not comparable."""
  for phase, color in colors.items():
    rows_of_phase = _rows_of_phase(rows, spans, phase)
    for metric, marker in PHASE_LOSSES.items():
      steps, loss = curve_of(rows_of_phase, metric).T
      axes.plot(steps, loss, "-", color=color, linewidth=0.8, alpha=0.5)
      axes.plot(steps, loss, marker, color=color, markersize=4)
  if len(spans) <= MAX_SPAN_LINES:
    for first, _, phase in spans:
      axes.axvline(first - 0.5, color=colors[phase], linewidth=0.6, alpha=0.4)
  eval_steps, eval_loss = curve_of(rows, "eval_loss").T
  if eval_steps.size:
    axes.plot(
      eval_steps,
      eval_loss,
      "o-",
      color="black",
      markersize=4,
      linewidth=1,
      label="held out",
    )
    axes.legend(frameon=False)
  axes.set_ylabel("loss (nats per token)")
  style_steps(axes)


def _rows_of_phase(rows: Sequence[LoggedRow], spans: Sequence[Span], phase: str) -> list[LoggedRow]:
  """The rows of the steps in the spans of a phase."""
  steps: set[int] = set()
  for first, last, phase_of_span in spans:
    if phase_of_span == phase:
      steps.update(range(first, last + 1))
  return [row for row in rows if row["step"] in steps]
