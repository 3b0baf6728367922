"""Swept keys against the best loss of each member, as parallel coordinates."""

import itertools
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import LogLocator, MaxNLocator

from maxlite.config.raw_values import show
from maxlite.metrics.plots.figure import (
  BEST_TO_WORST,
  CROWD,
  GRAY,
  LARGE_RANGE,
  Color,
  new_figure,
  save_figure,
  shorten,
)
from maxlite.metrics.step_row import LoggedRow

MAX_TICKS = 8  # per axis
NOT_USED = -0.1  # height of a member whose model does not have the key of an axis


class Scale(NamedTuple):
  """One axis of parallel coordinates.

  Attributes:
    heights: the height of each value, in [0, 1].
    ticks: (height, label) of each tick.
  """

  heights: list[float]
  ticks: list[tuple[float, str]]


def draw_parallel_coordinates(
  rows: Sequence[LoggedRow], keys: Sequence[str], png_path: Path
) -> None:
  """Draw each member as a line across one axis per swept key and a last axis for `best_loss`.

  Each row has `best_loss`; a member whose loss is None or not finite is a dotted line that ends
  before the last axis. The line of a member without a key crosses that axis below it. Positive
  numbers that span more than `LARGE_RANGE` have a log axis; other values are evenly spaced.

  Args:
    rows: the values of the keys, and the best loss, of each member.
    keys: the swept keys.
    png_path: where the plot is saved.
  """
  losses = np.asarray([row["best_loss"] for row in rows], np.float64)
  finite = np.flatnonzero(np.isfinite(losses)).tolist()
  loss_scale = _number_scale(losses[finite])
  loss_heights = dict(zip(finite, loss_scale.heights, strict=True))
  scales: list[Scale] = []
  for key in keys:
    values = [row.get(key) for row in rows]
    scales.append(scale_of(values))
  figure = new_figure(max(4.5, 1.5 + 1.7 * (len(keys) + 1)), 5, w_pad=0.15)
  axes = figure.add_subplot()
  linewidth = 1.8
  if len(rows) > CROWD:
    linewidth = 1
  worst_first = sorted(range(len(rows)), key=lambda index: -loss_heights.get(index, math.inf))
  for order, index in enumerate(worst_first):
    heights = [scale.heights[index] for scale in scales]
    zorder = 2 + order / len(rows)
    _draw_line(axes, heights, loss_heights.get(index), zorder, linewidth)
  for x, (key, scale) in enumerate(zip(keys, scales, strict=True)):
    _draw_axis(axes, x, _wrap_key(key), scale, is_loss=False)
  _draw_axis(axes, len(keys), _wrap_key("best loss"), loss_scale, is_loss=True)
  lowest = 0.0
  for scale in scales:
    lowest = min([lowest, *scale.heights])
  axes.set_xlim(-0.3, len(keys) + 0.45)
  axes.set_ylim(lowest - 0.04, 1.04)
  axes.axis("off")
  if len(finite) < len(rows):
    axes.text(0, lowest - 0.06, "dotted: no finite loss", va="top", fontsize=8, color=GRAY)
  save_figure(figure, png_path)


def _wrap_key(key: str) -> str:
  """Wrap a key at underscores to fit between two axes."""
  return textwrap.fill(key.replace("_", "_ "), 20).replace("_ ", "_")


def scale_of(values: Sequence[object]) -> Scale:
  """Choose the axis for `values`; see `draw_parallel_coordinates`. None is placed below it."""
  present = [value for value in values if value is not None]
  scale = _scale_of_present(present)
  if len(present) == len(values):
    return scale
  placed = iter(scale.heights)
  heights: list[float] = []
  for value in values:
    heights.append(NOT_USED if value is None else next(placed))
  return Scale(heights, [(NOT_USED, "not used"), *scale.ticks])


def _scale_of_present(values: Sequence[object]) -> Scale:
  """Choose the axis for values of which none is None."""
  if all(_is_number(value) for value in values):
    return _number_scale(np.asarray(values, np.float64))
  names = [show(value) for value in values]
  unique = list(dict.fromkeys(names))
  evenly = [0.5]
  if len(unique) > 1:
    evenly = np.linspace(0, 1, len(unique)).tolist()
  height_of = dict(zip(unique, evenly, strict=True))
  ticks = [(height, shorten(name, 14)) for name, height in height_of.items()]
  return Scale([height_of[name] for name in names], ticks)


def _is_number(value: object) -> bool:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _number_scale(values: np.ndarray) -> Scale:
  """The axis of numbers, with ticks at the values if they are few."""
  if not len(values):
    return Scale([], [])
  low = values.min()
  high = values.max()
  is_log = low > 0 and high > LARGE_RANGE * low
  norm = Normalize(low, high)
  locator: MaxNLocator | LogLocator = MaxNLocator(MAX_TICKS - 2)
  if is_log:
    norm = LogNorm(low, high)
    locator = LogLocator(numticks=99)

  def height(value: float) -> float:
    if high == low:
      return 0.5
    return float(norm(value))

  marked = np.unique(values).tolist()
  if len(marked) > MAX_TICKS:
    inside = [value for value in locator.tick_values(low, high) if low < value < high]
    marked = [low, *inside, high]
  ticks = [(height(value), _tick_label(value)) for value in marked]
  return Scale([height(value) for value in values], _without_overlap(ticks))


def _tick_label(value: float) -> str:
  if value == round(value):
    return f"{value:.7g}"
  return f"{value:.4g}"


def _without_overlap(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
  """Keep the first tick, the last, and those between whose labels do not overlap."""
  kept = [ticks[0]]
  if len(ticks) == 1:
    return kept
  last = ticks[-1]
  for tick in ticks[1:-1]:
    height, _ = tick
    previous, _ = kept[-1]
    if height - previous > 0.04 and last[0] - height > 0.04:
      kept.append(tick)
  kept.append(last)
  return kept


def _draw_line(
  axes: Axes,
  heights: Sequence[float],
  loss_height: float | None,
  zorder: float,
  linewidth: float,
) -> None:
  """Draw a smooth curve that is horizontal at each axis, so that crossing lines can be followed."""
  ends = list(heights)
  color: str | Color = GRAY
  linestyle = ":"
  if loss_height is not None:
    ends.append(loss_height)
    color = BEST_TO_WORST(loss_height)
    linestyle = "-"
  points = [(0.0, ends[0])]
  codes = [Curve.MOVETO]
  for x, (left, right) in enumerate(itertools.pairwise(ends)):
    points += [(x + 0.4, left), (x + 0.6, right), (x + 1, right)]
    codes += [Curve.CURVE4, Curve.CURVE4, Curve.CURVE4]
  patch = PathPatch(
    Curve(points, codes),
    fill=False,
    edgecolor=color,
    linestyle=linestyle,
    alpha=0.85,
    zorder=zorder,
    linewidth=linewidth,
  )
  axes.add_patch(patch)


def _draw_axis(axes: Axes, x: int, title: str, scale: Scale, is_loss: bool) -> None:
  """Draw the axis at `x` with its ticks; ticks of losses have the colours of the lines."""
  axes.plot([x, x], [0, 1], color=GRAY, linewidth=1, zorder=4)
  lowest = min((height for height, _ in scale.ticks), default=0.0)
  if lowest < 0:  # members that do not use the key
    axes.plot([x, x], [lowest, 0], ":", color=GRAY, linewidth=1, zorder=4)
  box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
  for height, label in scale.ticks:
    axes.plot([x, x + 0.03], [height, height], color=GRAY, linewidth=1, zorder=4)
    axes.text(
      x + 0.05,
      height,
      label,
      color=BEST_TO_WORST(height) if is_loss else "black",
      va="center",
      fontsize=8,
      zorder=5,
      bbox=box,
    )
  axes.text(x, 1.06, title, ha="center", va="bottom", fontsize=9, rotation=0)
