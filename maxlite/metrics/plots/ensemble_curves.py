"""Plots of an ensemble: learning curves, swept keys against loss, calibration, and lineage."""

import itertools
import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from maxlite.config.raw_values import show
from maxlite.metrics.plots.figure import (
  GRAY,
  curve_of,
  new_figure,
  save_figure,
  style_axes,
  style_steps,
)

CROWD = 12  # with more members, lines are thinner
NUM_LABELLED = 14  # best members with a label; the worst has one, too
LABEL_GAP = 0.055  # between labels, as a fraction of the axis
LARGE_RANGE = 10  # a larger ratio of values gives a log scale
MAX_TICKS = 8  # per axis of the parallel coordinates
NOT_USED = -0.1  # height of a member whose model does not have the key of an axis
# From dark to light, without the lightest fifth, which is invisible on white.
BEST_TO_WORST = ListedColormap(colormaps["viridis"](np.linspace(0, 0.82, 256)))
# A bin with fewer is not drawn: the standard error of its accuracy is up to 0.1.
MIN_BIN_TOKENS = 30
METHOD_COLORS = ("#2a6fbb", "#d95f02", "#1b9e77", "#b5338a", "#8c6d1f", "#555555")
_ARROW = {"arrowstyle": "-|>", "color": GRAY, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 1}
Segment = tuple[int, int, str, Mapping[str, float]]  # start, end, ancestor, hyperparameters


class _MemberCurves(NamedTuple):
  """The finite losses of a member, and whether its last loss is not finite."""

  name: str
  train_S2: np.ndarray  # (step, loss)
  held_out_S2: np.ndarray
  diverged: bool

  @classmethod
  def of(cls, name: str, rows: Sequence[Mapping[str, Any]]) -> "_MemberCurves":
    curves = [curve_of(rows, metric) for metric in ("loss", "eval_loss")]
    diverged = any(len(curve) and not np.isfinite(curve[-1, 1]) for curve in curves)
    train_S2, held_out_S2 = (curve[np.isfinite(curve[:, 1])] for curve in curves)
    return cls(name, train_S2, held_out_S2, diverged)

  @property
  def main_S2(self) -> np.ndarray:
    """The held-out losses, or the training losses of a member that was never evaluated."""
    return self.held_out_S2 if len(self.held_out_S2) else self.train_S2

  @property
  def best(self) -> float:
    return float(self.main_S2[:, 1].min()) if len(self.main_S2) else math.inf

  def end(self, axes: Axes) -> tuple[float, float]:
    """The end of the main curve, clipped to the plot."""
    step, loss = self.main_S2[-1]
    return float(step), float(np.clip(loss, *axes.get_ylim()))


def draw_learning_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]], png_path: Path) -> None:
  """Draw the held-out loss and, thinly, the training loss of every member, coloured by rank.

  Members are ranked by their best held-out loss, or best training loss if never evaluated. Losses
  far above the largest initial loss are cut off. A cross marks the end of a diverged member.

  Args:
    curves: member name -> logged rows.
  """
  members = sorted(itertools.starmap(_MemberCurves.of, curves.items()), key=lambda m: m.best)
  figure = new_figure(10, 5.6, w_pad=0.12, h_pad=0.1)
  axes = figure.add_subplot()
  axes.set_ylabel("loss (nats per token)")
  style_steps(axes)
  _set_limits(axes, members)
  colors = BEST_TO_WORST(np.linspace(0, 1, len(members)))
  for rank, (member, color) in enumerate(zip(members, colors, strict=True)):
    _draw_member(axes, member, color, zorder=3 - rank / len(members), crowded=len(members) > CROWD)
  _draw_labels(axes, members, colors)
  _draw_legend(axes, members)
  if len(members) > NUM_LABELLED + 1:
    _draw_color_bar(figure, axes, len(members))
  save_figure(figure, png_path)


def _set_limits(axes: Axes, members: Sequence[_MemberCurves]) -> None:
  curves = [c for m in members for c in (m.train_S2, m.held_out_S2) if len(c)]
  if not curves:
    return
  points = np.concatenate(curves)
  low, high = points[:, 1].min(), points[:, 1].max()
  high = min(high, 1.2 * max(curve[0, 1] for curve in curves))
  margin = 0.04 * (high - low) or 0.5
  if low > 0 and high > LARGE_RANGE * low:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low / 1.1, high * 1.1)
  else:
    axes.set_ylim(low - margin, high + margin)
  first, last = points[:, 0].min(), points[:, 0].max()
  axes.set_xlim(first - 0.01 * (last - first or 1), last + 0.01 * (last - first or 1))


def _draw_member(
  axes: Axes, member: _MemberCurves, color: np.ndarray, zorder: float, crowded: bool
) -> None:
  if len(member.held_out_S2):
    axes.plot(*member.train_S2.T, color=color, linewidth=0.5, alpha=0.3, zorder=1)
  marker = "" if crowded and len(member.main_S2) > 1 else "o"  # a single loss has no line
  style: dict[str, Any] = {"linewidth": 1.1 if crowded else 1.6, "marker": marker, "markersize": 3}
  axes.plot(*member.main_S2.T, color=color, zorder=zorder, **style)
  if len(member.main_S2) and not member.diverged:  # also where the curve ends before the others
    axes.plot(*member.end(axes), "o", color=color, markersize=4, zorder=zorder)
  if member.diverged and len(member.main_S2):
    axes.plot(*member.end(axes), "x", color=color, markersize=7, mew=1.8, zorder=4, clip_on=False)


def _draw_labels(axes: Axes, members: Sequence[_MemberCurves], colors: np.ndarray) -> None:
  """Label the best members and the worst, right of the plot.

  A label shows the last loss, its step if others were trained longer, and the best loss if that is
  another. A dotted gray line leads to it
  from the end of the curve: level inside the plot, so that it does not look like more of the curve.
  """
  drawn = [(rank, member) for rank, member in enumerate(members) if len(member.main_S2)]
  chosen = drawn[:NUM_LABELLED] + drawn[NUM_LABELLED:][-1:]
  to_fraction = axes.transData + axes.transAxes.inverted()
  ends = [to_fraction.transform(member.end(axes)) for _, member in chosen]
  heights = spread([float(y) for _, y in ends], LABEL_GAP)
  last_step = max((member.main_S2[-1, 0] for _, member in drawn), default=0)
  for (rank, member), (x, y), height in zip(chosen, ends, heights, strict=True):
    _draw_leader(axes, [(x + 0.005, y), (1.0, y), (1.04, height)])
    last = float(member.main_S2[-1, 1])
    text = f"{rank + 1}. {_shorten(member.name)}  {last:#.4g}"
    if member.main_S2[-1, 0] < last_step:
      text += f" at step {member.main_S2[-1, 0]:.0f}"
    if member.best < last:
      text += f" (best {member.best:#.4g})"
    axes.annotate(
      text,
      member.end(axes),
      (1.05, height),
      xycoords="data",
      textcoords="axes fraction",
      va="center",
      fontsize=9,
      color=colors[rank],
      annotation_clip=False,
    )


def _draw_leader(axes: Axes, points: Sequence[tuple[float, float]]) -> None:
  """Draw a line through `points`, in fractions of the axes."""
  x, y = zip(*points, strict=True)
  axes.plot(
    x,
    y,
    ":",
    color=GRAY,
    linewidth=0.7,
    transform=axes.transAxes,
    clip_on=False,
    scalex=False,
    scaley=False,
  )


def _shorten(name: str, limit: int = 28) -> str:
  return name if len(name) <= limit else f"{name[: limit - 1]}…"


def spread(heights: Sequence[float], gap: float) -> list[float]:
  """Move heights up, in order, until they are `gap` apart, and down from 1 if they exceed it."""
  order = np.argsort(heights, kind="stable")
  offset = gap * np.arange(len(heights))
  placed = np.maximum.accumulate(np.asarray(heights, np.float64)[order] - offset)
  result = np.empty_like(placed)
  result[order] = np.minimum(placed, 1 - gap * (len(heights) - 1)) + offset
  return result.tolist()


def _draw_legend(axes: Axes, members: Sequence[_MemberCurves]) -> None:
  """Explain thick lines, thin lines and crosses, as far as the plot has them."""
  kinds = (
    ("held out", any(len(m.held_out_S2) for m in members), {"linewidth": 1.6}),
    ("training", any(len(m.train_S2) for m in members), {"linewidth": 0.6}),
    ("diverged", any(m.diverged for m in members), {"linewidth": 0, "marker": "x", "mew": 1.8}),
  )
  handles = [
    Line2D([], [], color=GRAY, label=k, **style) for k, is_drawn, style in kinds if is_drawn
  ]
  if handles:
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="upper right")


def _draw_color_bar(figure: Figure, axes: Axes, num_members: int) -> None:
  norm = BoundaryNorm(np.arange(num_members + 1) + 0.5, BEST_TO_WORST.N)
  bar = figure.colorbar(ScalarMappable(norm, BEST_TO_WORST), ax=axes, aspect=40)
  bar.ax.invert_yaxis()
  bar.set_ticks(sorted({1, *range(10, num_members - 3, 10), num_members}))
  bar.ax.minorticks_off()
  bar.ax.tick_params(labelsize=8)
  bar.set_label("rank by best held-out loss", fontsize=9)


class Scale(NamedTuple):
  """One axis of parallel coordinates: a height in [0, 1] per value, and ticks (height, label)."""

  heights: list[float]
  ticks: list[tuple[float, str]]


def draw_parallel_coordinates(
  rows: Sequence[Mapping[str, Any]], keys: Sequence[str], png_path: Path
) -> None:
  """Draw each member as a line across one axis per swept key and a last axis for `best_loss`.

  Each row has `best_loss`; a member whose loss is None or not finite is a dotted line that ends
  before the last axis. The line of a member without a key crosses that axis below it. Positive
  numbers that span more than `LARGE_RANGE` have a log axis; other values are evenly spaced.
  """
  losses = np.asarray([row["best_loss"] for row in rows], np.float64)
  finite = np.flatnonzero(np.isfinite(losses))
  scales = [scale_of([row.get(key) for row in rows]) for key in keys]
  loss_scale = _number_scale(losses[finite])
  figure = new_figure(max(4.5, 1.5 + 1.7 * (len(keys) + 1)), 5, w_pad=0.15)
  axes = figure.add_subplot()
  loss_heights = dict(zip(finite.tolist(), loss_scale.heights, strict=True))
  worst_first = sorted(range(len(rows)), key=lambda i: -loss_heights.get(i, math.inf))
  for order, i in enumerate(worst_first):
    heights = [scale.heights[i] for scale in scales]
    style = {"zorder": 2 + order / len(rows), "linewidth": 1 if len(rows) > CROWD else 1.8}
    _draw_line(axes, heights, loss_heights.get(i), style)
  for x, (title, scale) in enumerate(zip([*keys, "best loss"], [*scales, loss_scale], strict=True)):
    _draw_axis(axes, x, _wrap_key(title), scale, is_loss=x == len(keys))
  axes.set_xlim(-0.3, len(keys) + 0.45)
  lowest = min((height for scale in scales for height in scale.heights), default=0.0)
  axes.set_ylim(min(lowest, 0.0) - 0.04, 1.04)
  axes.axis("off")
  if len(finite) < len(rows):
    axes.text(
      0, min(lowest, 0.0) - 0.06, "dotted: no finite loss", va="top", fontsize=8, color=GRAY
    )
  save_figure(figure, png_path)


def _wrap_key(key: str) -> str:
  """Wrap a key at underscores to fit between two axes."""
  return textwrap.fill(key.replace("_", "_ "), 20).replace("_ ", "_")


def scale_of(values: Sequence[Any]) -> Scale:
  """Choose the axis for `values`; see `draw_parallel_coordinates`. None is placed below it."""
  present = [value for value in values if value is not None]
  scale = _scale_of_present(present)
  if len(present) == len(values):
    return scale
  placed = iter(scale.heights)
  heights = [NOT_USED if value is None else next(placed) for value in values]
  return Scale(heights, [(NOT_USED, "not used"), *scale.ticks])


def _scale_of_present(values: Sequence[Any]) -> Scale:
  if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
    return _number_scale(np.asarray(values, np.float64))
  names = [show(value) for value in values]
  unique = list(dict.fromkeys(names))
  evenly = np.linspace(0, 1, len(unique)).tolist() if len(unique) > 1 else [0.5]
  heights = dict(zip(unique, evenly, strict=True))
  return Scale([heights[n] for n in names], [(heights[n], _shorten(n, 14)) for n in unique])


def _number_scale(values: np.ndarray) -> Scale:
  if not len(values):
    return Scale([], [])
  low, high = values.min(), values.max()
  is_log = low > 0 and high > LARGE_RANGE * low
  norm = LogNorm(low, high) if is_log else Normalize(low, high)
  height = lambda value: float(norm(value)) if high > low else 0.5
  marked = np.unique(values).tolist()
  if len(marked) > MAX_TICKS:
    locator = LogLocator(numticks=99) if is_log else MaxNLocator(MAX_TICKS - 2)
    marked = [low, *(v for v in locator.tick_values(low, high) if low < v < high), high]
  ticks = [(height(v), f"{v:.7g}" if v == round(v) else f"{v:.4g}") for v in marked]
  return Scale([height(value) for value in values], _without_overlap(ticks))


def _without_overlap(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
  """Keep the first tick, the last, and those between whose labels do not overlap."""
  kept = [ticks[0]]
  for tick in ticks[1:-1]:
    if tick[0] - kept[-1][0] > 0.04 and ticks[-1][0] - tick[0] > 0.04:
      kept.append(tick)
  return [*kept, *ticks[1:][-1:]]


def _draw_line(
  axes: Axes, heights: Sequence[float], loss_height: float | None, style: Mapping[str, Any]
) -> None:
  """Draw a smooth curve that is horizontal at each axis, so that crossing lines can be followed."""
  ends = [*heights] if loss_height is None else [*heights, loss_height]
  points, codes = [(0.0, ends[0])], [Curve.MOVETO]
  for x, (left, right) in enumerate(itertools.pairwise(ends)):
    points += [(x + 0.4, left), (x + 0.6, right), (x + 1, right)]
    codes += [Curve.CURVE4] * 3
  color, dashes = (GRAY, ":") if loss_height is None else (BEST_TO_WORST(loss_height), "-")
  style = {"fill": False, "edgecolor": color, "linestyle": dashes, "alpha": 0.85, **style}
  axes.add_patch(PathPatch(Curve(points, codes), **style))


def _draw_axis(axes: Axes, x: int, title: str, scale: Scale, is_loss: bool) -> None:
  axes.plot([x, x], [0, 1], color=GRAY, linewidth=1, zorder=4)
  if scale.ticks and scale.ticks[0][0] < 0:  # members that do not use the key
    axes.plot([x, x], [scale.ticks[0][0], 0], ":", color=GRAY, linewidth=1, zorder=4)
  box = {"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8}
  for height, label in scale.ticks:
    axes.plot([x, x + 0.03], [height, height], color=GRAY, linewidth=1, zorder=4)
    color = BEST_TO_WORST(height) if is_loss else "black"
    style: dict[str, Any] = {"va": "center", "fontsize": 8, "zorder": 5, "bbox": box}
    axes.text(x + 0.05, height, label, color=color, **style)
  axes.text(x, 1.06, title, ha="center", va="bottom", fontsize=9, rotation=0)


def draw_calibration(methods: Mapping[str, Mapping[str, Any]], png_path: Path) -> None:
  """Draw accuracy over confidence for each method, and below it the histogram of confidences.

  The accuracy of bins with fewer than `MIN_BIN_TOKENS` tokens is not drawn.

  Args:
    methods: name -> `bin_weight`, `bin_confidence` and `bin_correct`, sums over the tokens of each
      bin of equal width, and `ece`, the expected calibration error.
  """
  figure = new_figure(5.6, 7, w_pad=0.12, h_pad=0.08)
  above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
  above.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle="--", label="calibrated")
  for i, (name, method) in enumerate(methods.items()):
    weight_C = np.asarray(method["bin_weight"], np.float64)
    used = weight_C >= MIN_BIN_TOKENS
    confidence_C, accuracy_C = (
      np.asarray(method[key], np.float64)[used] / weight_C[used]
      for key in ("bin_confidence", "bin_correct")
    )
    style: dict[str, Any] = {
      "color": METHOD_COLORS[i % len(METHOD_COLORS)],
      "linestyle": ("-", "-.")[i // len(METHOD_COLORS) % 2],
      "linewidth": 1.5,
    }
    label = f"{_shorten(name)} (ECE {100 * method['ece']:.2f} %)"
    above.plot(confidence_C, accuracy_C, marker="o", markersize=3.5, label=label, **style)
    edges = np.linspace(0, 1, len(weight_C) + 1)
    below.stairs(weight_C / max(weight_C.sum(), 1e-30), edges, baseline=None, **style)
  above.set(ylabel="accuracy", xlim=(0, 1), ylim=(0, 1), box_aspect=1)
  figure.legend(frameon=False, fontsize=8, loc="outside upper center", ncols=2)
  below.set(xlabel="confidence", ylabel="share of tokens", ylim=(0, None), box_aspect=1 / 3)
  below.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
  for axes in (above, below):
    style_axes(axes)
  save_figure(figure, png_path)


def draw_lineage(
  final: Mapping[str, Mapping[str, float]],
  rows: Sequence[Mapping[str, Any]],
  last_step: int,
  png_path: Path,
) -> None:
  """Draw who continues from whom in population-based training.

  There is a line per member with an arrow per copy, and below it every hyperparameter over steps. A
  colour is an ancestor that has descendants at the end; others are gray.

  Args:
    final: the members' hyperparameters at the end, by name.
    rows: of `population.LINEAGE`, by step.
  """
  segments = _segments(final, rows, last_step)
  survivors = sorted({own[-1][2] for own in segments.values()})
  colors = {name: colormaps["tab10"](n % 10) for n, name in enumerate(survivors)}
  keys, ratios = list(next(iter(final.values()))), [1 + 0.25 * len(final)]
  ratios += [2] * len(keys)
  figure = new_figure(9, sum(ratios) + 0.5, w_pad=0.12, h_pad=0.08)
  panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
  height_of = {name: y for y, name in enumerate(segments)}
  for name, (start, end, ancestor, values) in ((n, s) for n in segments for s in segments[n]):
    for axes, y in zip(panels, [height_of[name], *map(values.get, keys)], strict=True):
      axes.hlines(y, start, end, color=colors.get(ancestor, GRAY), linewidth=1.8)
  for row in rows:
    tail, head = ((row["step"], height_of[row[key]]) for key in ("from", "member"))
    panels[0].annotate("", head, tail, arrowprops=_ARROW)
  panels[0].set_yticks(range(len(segments)), list(segments))
  panels[0].invert_yaxis()
  for axes, key in zip(panels[1:], keys, strict=True):
    axes.set_ylabel(key)
    low, high = axes.dataLim.intervaly
    axes.set_yscale("log" if low > 0 and high > LARGE_RANGE * low else "linear")
  for axes in panels:
    style_steps(axes)
    axes.label_outer()
  save_figure(figure, png_path)


def _segments(
  final: Mapping[str, Mapping[str, float]], rows: Sequence[Mapping[str, Any]], last_step: int
) -> dict[str, list[Segment]]:
  """Per member, its time from one copy to the next."""
  ancestor_of, start_of = {name: name for name in final}, dict.fromkeys(final, 0)
  segments: dict[str, list[Segment]] = {name: [] for name in final}
  for row in rows:
    name, step = row["member"], row["step"]
    segments[name].append((start_of[name], step, ancestor_of[name], row["before"]))
    start_of[name], ancestor_of[name] = step, ancestor_of[row["from"]]
  for name, own in segments.items():
    own.append((start_of[name], last_step, ancestor_of[name], final[name]))
  return segments
