"""An ensemble as pictures: its members' learning, what was swept, how calibrated it is."""

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
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from maxlite.config.values import show
from maxlite.metrics.plots.curves import GRAY, save, tidy

CROWD = 12  # members: more are drawn in thinner lines
NUM_LABELLED = 5  # of the best members; the worst is labelled too
LARGE_RANGE = 10  # times: values that span more are drawn on a log scale
MAX_TICKS = 8  # of one axis of the parallel coordinates
# From dark to light, but for the lightest fifth, which on white would not be seen.
BEST_TO_WORST = ListedColormap(colormaps["viridis"](np.linspace(0, 0.82, 256)))
METHOD_COLORS = ("#2a6fbb", "#d95f02", "#1b9e77", "#b5338a", "#8c6d1f", "#555555")


class _Learning(NamedTuple):
  """A member's finite losses over steps, and whether it ends in one that is not finite."""

  name: str
  train_S2: np.ndarray  # (step, loss)
  held_out_S2: np.ndarray
  diverged: bool

  @property
  def main_S2(self) -> np.ndarray:
    return self.held_out_S2 if len(self.held_out_S2) else self.train_S2

  @property
  def best(self) -> float:
    return float(self.main_S2[:, 1].min()) if len(self.main_S2) else math.inf


def draw_learning_curves(curves: Mapping[str, Sequence[Mapping[str, Any]]], png_path: Path) -> None:
  """Draws every member's held-out loss, and thinly its training loss, coloured by its rank.

  `curves` has the rows of each member's metrics by its name. The best member has the smallest
  held-out loss; one that never was evaluated counts by its training loss. What rises far above
  the largest loss at the start is cut off, and a member that diverged ends in a cross.
  """
  members = sorted((_learning(*item) for item in curves.items()), key=lambda member: member.best)
  layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1)
  figure = Figure(figsize=(10, 5.6), layout=layout, dpi=150)
  axes = figure.add_subplot()
  axes.set_xlabel("step")
  axes.set_ylabel("loss (nats per token)")
  tidy(axes)
  _fit_losses(axes, members)
  colors = BEST_TO_WORST(np.linspace(0, 1, len(members)))
  for rank, (member, color) in enumerate(zip(members, colors, strict=True)):
    _draw_member(axes, member, color, zorder=3 - rank / len(members), crowded=len(members) > CROWD)
  _label_ends(axes, members, colors)
  _draw_legend(axes, members)
  if len(members) > NUM_LABELLED + 1:
    _draw_ranks(figure, axes, len(members))
  save(figure, png_path)


def _learning(name: str, rows: Sequence[Mapping[str, Any]]) -> _Learning:
  train_S2, held_out_S2 = _curve(rows, "loss"), _curve(rows, "eval_loss")
  diverged = any(len(curve) and not np.isfinite(curve[-1, 1]) for curve in (train_S2, held_out_S2))
  train_S2, held_out_S2 = (c[np.isfinite(c[:, 1])] for c in (train_S2, held_out_S2))
  return _Learning(name, train_S2, held_out_S2, diverged)


def _curve(rows: Sequence[Mapping[str, Any]], metric: str) -> np.ndarray:
  points = [(row["step"], row[metric]) for row in rows if metric in row]
  return np.asarray(points, np.float64).reshape(-1, 2)


def _fit_losses(axes: Axes, members: Sequence[_Learning]) -> None:
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
  axes: Axes, member: _Learning, color: np.ndarray, zorder: float, crowded: bool
) -> None:
  if len(member.held_out_S2):
    axes.plot(*member.train_S2.T, color=color, linewidth=0.5, alpha=0.3, zorder=1)
  marker = "" if crowded else "o"
  width = 1.1 if crowded else 1.6
  axes.plot(
    *member.main_S2.T, color=color, linewidth=width, marker=marker, markersize=3, zorder=zorder
  )
  if member.diverged and len(member.main_S2):
    step, loss = _end(axes, member)
    axes.plot(step, loss, "x", color=color, markersize=7, mew=1.8, zorder=4, clip_on=False)


def _end(axes: Axes, member: _Learning) -> tuple[float, float]:
  """Where a member's curve ends, within the picture."""
  step, loss = member.main_S2[-1]
  return float(step), float(np.clip(loss, *axes.get_ylim()))


def _label_ends(axes: Axes, members: Sequence[_Learning], colors: np.ndarray) -> None:
  """Names the best members and the worst at the right, side by side, with a line to their end."""
  drawn = [(rank, member) for rank, member in enumerate(members) if len(member.main_S2)]
  chosen = drawn[:NUM_LABELLED] + drawn[NUM_LABELLED:][-1:]
  to_fraction = axes.transData + axes.transAxes.inverted()
  heights = [to_fraction.transform(_end(axes, member))[1] for _, member in chosen]
  for (rank, member), height in zip(chosen, spread(heights, 0.055), strict=True):
    axes.annotate(
      f"{rank + 1}. {_shorten(member.name)}  {member.best:#.4g}",
      _end(axes, member),
      (1.05, height),
      xycoords="data",
      textcoords="axes fraction",
      va="center",
      fontsize=9,
      color=colors[rank],
      annotation_clip=False,
      arrowprops={
        "arrowstyle": "-",
        "relpos": (0, 0.5),
        "shrinkA": 0,
        "color": colors[rank],
        "linewidth": 0.6,
        "alpha": 0.6,
      },
    )


def _shorten(name: str, limit: int = 28) -> str:
  return name if len(name) <= limit else f"{name[: limit - 1]}…"


def spread(heights: Sequence[float], gap: float) -> list[float]:
  """The heights, in their order, moved up to be `gap` apart; where that passes 1, down from 1."""
  order = np.argsort(heights, kind="stable")
  placed = np.asarray(heights, np.float64)[order]
  for i in range(1, len(placed)):
    placed[i] = max(placed[i], placed[i - 1] + gap)
  limit = 1.0
  for i in reversed(range(len(placed))):
    placed[i] = min(placed[i], limit)
    limit = placed[i] - gap
  result = np.empty_like(placed)
  result[order] = placed
  return result.tolist()


def _draw_legend(axes: Axes, members: Sequence[_Learning]) -> None:
  """Says what thick, thin and crossed lines are, of the kinds that there are."""
  kinds = []
  if any(len(member.held_out_S2) for member in members):
    kinds.append(Line2D([], [], color=GRAY, linewidth=1.6, label="held out"))
  if any(len(member.train_S2) for member in members):
    kinds.append(Line2D([], [], color=GRAY, linewidth=0.6, label="training"))
  if any(member.diverged for member in members):
    kinds.append(Line2D([], [], color=GRAY, linewidth=0, marker="x", mew=1.8, label="diverged"))
  if kinds:
    axes.legend(handles=kinds, frameon=False, fontsize=9, loc="upper right")


def _draw_ranks(figure: Figure, axes: Axes, num_members: int) -> None:
  norm = BoundaryNorm(np.arange(num_members + 1) + 0.5, BEST_TO_WORST.N)
  bar = figure.colorbar(ScalarMappable(norm, BEST_TO_WORST), ax=axes, aspect=40)
  bar.ax.invert_yaxis()
  bar.set_ticks(sorted({1, *range(10, num_members - 3, 10), num_members}))
  bar.ax.minorticks_off()
  bar.ax.tick_params(labelsize=8)
  bar.set_label("rank by best held-out loss", fontsize=9)


class Scale(NamedTuple):
  """One axis of the parallel coordinates: a height from 0 to 1 for every value, and its ticks."""

  heights: list[float]
  ticks: list[tuple[float, str]]


def draw_parallel_coordinates(
  rows: Sequence[Mapping[str, Any]], keys: Sequence[str], png_path: Path
) -> None:
  """Draws each member as a line over one axis per swept key, and last its `best_loss`.

  Each row has a value for every key, and `best_loss`, None or NaN where there is none: such a
  member is a dotted line that ends before the last axis. Numbers above zero that span more than
  `LARGE_RANGE` stand on a log axis; what is no number has evenly spaced places.
  """
  losses = np.asarray([row["best_loss"] for row in rows], np.float64)
  known = np.flatnonzero(np.isfinite(losses))
  scales = [scale_of([row[key] for row in rows]) for key in keys]
  loss_scale = _number_scale(losses[known])
  width = max(4.5, 1.5 + 1.7 * (len(keys) + 1))
  figure = Figure(figsize=(width, 5), layout=ConstrainedLayoutEngine(w_pad=0.15), dpi=150)
  axes = figure.add_subplot()
  loss_heights = dict(zip(known.tolist(), loss_scale.heights, strict=True))
  worst_first = sorted(range(len(rows)), key=lambda i: -loss_heights.get(i, math.inf))
  for zorder, i in enumerate(worst_first):
    heights = [scale.heights[i] for scale in scales]
    _draw_line(axes, heights, loss_heights.get(i), 2 + zorder / len(rows), len(rows) > CROWD)
  for x, (title, scale) in enumerate(zip([*keys, "best loss"], [*scales, loss_scale], strict=True)):
    _draw_axis(axes, x, _broken(title), scale, is_loss=x == len(keys))
  axes.set_xlim(-0.3, len(keys) + 0.45)
  axes.set_ylim(-0.04, 1.04)
  axes.axis("off")
  if len(known) < len(rows):
    axes.text(0, -0.06, "dotted: no finite loss", va="top", fontsize=8, color=GRAY)
  save(figure, png_path)


def _broken(key: str) -> str:
  """A key over as many lines as it needs to stay narrower than the room between two axes."""
  return textwrap.fill(key.replace("_", "_ "), 20).replace("_ ", "_")


def scale_of(values: Sequence[Any]) -> Scale:
  """The axis that holds `values`; see `draw_parallel_coordinates`."""
  if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
    return _number_scale(np.asarray(values, np.float64))
  names = [show(value) for value in values]
  places = {name: place for place, name in enumerate(dict.fromkeys(names))}
  height = lambda name: places[name] / (len(places) - 1) if len(places) > 1 else 0.5
  ticks = [(height(name), _shorten(name, 14)) for name in places]
  return Scale([height(name) for name in names], ticks)


def _number_scale(values: np.ndarray) -> Scale:
  if not len(values):
    return Scale([], [])
  is_log = values.min() > 0 and values.max() > LARGE_RANGE * values.min()
  measure = np.log if is_log else np.asarray
  low, high = float(measure(values.min())), float(measure(values.max()))
  height = lambda value: (measure(value) - low) / (high - low) if high > low else value * 0 + 0.5
  marked = np.unique(values)
  if len(marked) > MAX_TICKS:
    marked = _round_numbers(values.min(), values.max(), is_log)
  ticks = [(float(height(v)), f"{v:.7g}" if v == round(v) else f"{v:.4g}") for v in marked]
  return Scale(height(values).tolist(), _apart(ticks))


def _round_numbers(low: float, high: float, is_log: bool) -> np.ndarray:
  """Ticks for many values: both ends, and round numbers between them."""
  if is_log:
    exponents = np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    between = 10.0**exponents
  else:
    between = np.asarray(MaxNLocator(MAX_TICKS - 2).tick_values(low, high))
  return np.unique([low, *between[(between > low) & (between < high)], high])


def _apart(ticks: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
  """The first tick, the last, and those between that keep a line of text from their neighbours."""
  if len(ticks) < 2:
    return list(ticks)
  first, *between, last = ticks
  kept = [first]
  for tick in between:
    if tick[0] - kept[-1][0] > 0.04 and last[0] - tick[0] > 0.04:
      kept.append(tick)
  return [*kept, last]


def _draw_line(
  axes: Axes, heights: Sequence[float], loss_height: float | None, zorder: float, crowded: bool
) -> None:
  """A curve, level where it crosses an axis, so that lines through one point can be followed."""
  ends = [*heights] if loss_height is None else [*heights, loss_height]
  points, codes = [(0.0, ends[0])], [Curve.MOVETO]
  for x, (here, there) in enumerate(itertools.pairwise(ends)):
    points += [(x + 0.4, here), (x + 0.6, there), (x + 1, there)]
    codes += [Curve.CURVE4] * 3
  color = GRAY if loss_height is None else BEST_TO_WORST(loss_height)
  axes.add_patch(
    PathPatch(
      Curve(points, codes),
      fill=False,
      edgecolor=color,
      linewidth=1 if crowded else 1.8,
      linestyle=":" if loss_height is None else "-",
      alpha=0.85,
      zorder=zorder,
    )
  )


def _draw_axis(axes: Axes, x: int, title: str, scale: Scale, is_loss: bool) -> None:
  axes.plot([x, x], [0, 1], color=GRAY, linewidth=1, zorder=4)
  for height, label in scale.ticks:
    axes.plot([x, x + 0.03], [height, height], color=GRAY, linewidth=1, zorder=4)
    axes.text(
      x + 0.05,
      height,
      label,
      va="center",
      fontsize=8,
      color=BEST_TO_WORST(height) if is_loss else "black",
      zorder=5,
      bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8},
    )
  axes.text(x, 1.06, title, ha="center", va="bottom", fontsize=9, rotation=0)


def draw_calibration(methods: Mapping[str, Mapping[str, Any]], png_path: Path) -> None:
  """Draws accuracy over confidence for each method, and below it how often which confidence is.

  A method has `bin_weight`, `bin_confidence` and `bin_correct`, sums over the tokens of each of
  the bins of equal width, and `ece`, its expected calibration error.
  """
  layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
  figure = Figure(figsize=(5.6, 7), layout=layout, dpi=150)
  above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
  above.plot([0, 1], [0, 1], color=GRAY, linewidth=1, linestyle="--", label="calibrated")
  for i, (name, method) in enumerate(methods.items()):
    weight_C = np.asarray(method["bin_weight"], np.float64)
    used = weight_C > 0
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
  above.set_ylabel("accuracy")
  above.set_ylim(0, 1)
  above.set_box_aspect(1)
  above.legend(frameon=False, fontsize=8, loc="upper left")
  below.set_xlabel("confidence")
  below.set_ylabel("share of tokens")
  below.set_box_aspect(1 / 3)
  below.set_xlim(0, 1)
  below.set_ylim(bottom=0)
  below.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
  for axes in (above, below):
    tidy(axes)
  save(figure, png_path)
