"""The learning curves of the members of an ensemble."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from maxlite.metrics.plots.figure import (
  BEST_TO_WORST,
  CROWD,
  GRAY,
  LARGE_RANGE,
  curve_of,
  new_figure,
  save_figure,
  shorten,
  style_steps,
)
from maxlite.metrics.step_row import LoggedRow

NUM_LABELLED = 14  # best members with a label; the worst has one, too
LABEL_GAP = 0.055  # between labels, as a fraction of the axis


class _MemberCurves(NamedTuple):
  """The finite losses of a member.

  Attributes:
    name: the member's name.
    train_S2: its training losses, rows of (step, loss).
    held_out_S2: its held-out losses, rows of (step, loss).
    diverged: whether its last loss is not finite.
  """

  name: str
  train_S2: np.ndarray
  held_out_S2: np.ndarray
  diverged: bool

  @property
  def main_S2(self) -> np.ndarray:
    """The held-out losses, or the training losses of a member that was never evaluated."""
    if len(self.held_out_S2):
      return self.held_out_S2
    return self.train_S2

  @property
  def best(self) -> float:
    """The lowest loss of the main curve; infinite if it has none."""
    if not len(self.main_S2):
      return math.inf
    return float(self.main_S2[:, 1].min())

  def end(self, axes: Axes) -> tuple[float, float]:
    """The end of the main curve, clipped to the plot."""
    step, loss = self.main_S2[-1]
    low, high = axes.get_ylim()
    return float(step), float(np.clip(loss, low, high))


def _member_curves(name: str, rows: Sequence[LoggedRow]) -> _MemberCurves:
  """The curves of a member from its logged rows."""
  train_S2 = curve_of(rows, "loss")
  held_out_S2 = curve_of(rows, "eval_loss")
  diverged = False
  for curve_S2 in (train_S2, held_out_S2):
    if len(curve_S2) and not np.isfinite(curve_S2[-1, 1]):
      diverged = True
  return _MemberCurves(
    name=name,
    train_S2=train_S2[np.isfinite(train_S2[:, 1])],
    held_out_S2=held_out_S2[np.isfinite(held_out_S2[:, 1])],
    diverged=diverged,
  )


def draw_learning_curves(curves: Mapping[str, Sequence[LoggedRow]], png_path: Path) -> None:
  """Draw the held-out loss and, thinly, the training loss of every member, coloured by rank.

  Members are ranked by their best held-out loss, or best training loss if never evaluated. Losses
  far above the largest initial loss are cut off. A cross marks the end of a diverged member.

  Args:
    curves: member name -> logged rows.
    png_path: where the plot is saved.
  """
  members = [_member_curves(name, rows) for name, rows in curves.items()]
  members.sort(key=lambda member: member.best)
  figure = new_figure(10, 5.6, w_pad=0.12, h_pad=0.1)
  axes = figure.add_subplot()
  axes.set_ylabel("loss (nats per token)")
  style_steps(axes)
  _set_limits(axes, members)
  colors = BEST_TO_WORST(np.linspace(0, 1, len(members)))
  is_crowded = len(members) > CROWD
  for rank, (member, color) in enumerate(zip(members, colors, strict=True)):
    zorder = 3 - rank / len(members)
    _draw_member(axes, member, color, zorder, is_crowded)
  _draw_labels(axes, members, colors)
  _draw_legend(axes, members)
  if len(members) > NUM_LABELLED + 1:
    _draw_color_bar(figure, axes, len(members))
  save_figure(figure, png_path)


def _set_limits(axes: Axes, members: Sequence[_MemberCurves]) -> None:
  """Set the range and the scale of both axes, by the losses of all members."""
  curves: list[np.ndarray] = []
  for member in members:
    for curve_S2 in (member.train_S2, member.held_out_S2):
      if len(curve_S2):
        curves.append(curve_S2)
  if not curves:
    return
  points = np.concatenate(curves)
  steps = points[:, 0]
  losses = points[:, 1]
  largest_initial = max(curve_S2[0, 1] for curve_S2 in curves)
  low = losses.min()
  high = min(losses.max(), 1.2 * largest_initial)
  if low > 0 and high > LARGE_RANGE * low:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low / 1.1, high * 1.1)
  else:
    margin = 0.04 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)
  first = steps.min()
  last = steps.max()
  margin = 0.01 * (last - first or 1)
  axes.set_xlim(first - margin, last + margin)


def _draw_member(
  axes: Axes,
  member: _MemberCurves,
  color: np.ndarray,
  zorder: float,
  is_crowded: bool,
) -> None:
  """Draw the curves of a member, and a mark at the end of its main curve."""
  if len(member.held_out_S2):
    steps, losses = member.train_S2.T
    axes.plot(steps, losses, color=color, linewidth=0.5, alpha=0.3, zorder=1)
  linewidth = 1.6
  marker = "o"
  if is_crowded:
    linewidth = 1.1
    if len(member.main_S2) > 1:  # a single loss has no line
      marker = ""
  steps, losses = member.main_S2.T
  axes.plot(
    steps,
    losses,
    color=color,
    zorder=zorder,
    linewidth=linewidth,
    marker=marker,
    markersize=3,
  )
  if not len(member.main_S2):
    return
  step, loss = member.end(axes)
  if member.diverged:
    axes.plot(
      step,
      loss,
      "x",
      color=color,
      markersize=7,
      mew=1.8,
      zorder=4,
      clip_on=False,
    )
  else:  # also where the curve ends before the others
    axes.plot(step, loss, "o", color=color, markersize=4, zorder=zorder)


def _draw_labels(axes: Axes, members: Sequence[_MemberCurves], colors: np.ndarray) -> None:
  """Label the best members and the worst, right of the plot.

  A label shows the last loss, its step if others were trained longer, and the best loss if that is
  another. A dotted gray line leads to it from the end of the curve: level inside the plot, so that
  it does not look like more of the curve.
  """
  ranks = [rank for rank, member in enumerate(members) if len(member.main_S2)]
  last_step = max((members[rank].main_S2[-1, 0] for rank in ranks), default=0)
  labelled = ranks[:NUM_LABELLED]
  if len(ranks) > NUM_LABELLED:
    labelled.append(ranks[-1])
  to_fraction = axes.transData + axes.transAxes.inverted()
  ends = [to_fraction.transform(members[rank].end(axes)) for rank in labelled]
  heights = spread([float(y) for _, y in ends], LABEL_GAP)
  for rank, (x, y), height in zip(labelled, ends, heights, strict=True):
    _draw_leader(axes, x + 0.005, y, height)
    axes.annotate(
      f"{rank + 1}. {_describe_member(members[rank], last_step)}",
      members[rank].end(axes),
      (1.05, height),
      xycoords="data",
      textcoords="axes fraction",
      va="center",
      fontsize=9,
      color=colors[rank],
      annotation_clip=False,
    )


def _describe_member(member: _MemberCurves, last_step: float) -> str:
  """The name and the last loss of a member; `last_step` is the last step of any member."""
  step, loss = member.main_S2[-1]
  text = f"{shorten(member.name)}  {loss:#.4g}"
  if step < last_step:
    text += f" at step {step:.0f}"
  if member.best < loss:
    text += f" (best {member.best:#.4g})"
  return text


def _draw_leader(axes: Axes, x: float, y: float, label_height: float) -> None:
  """Draw a line from (x, y) to the label right of the plot, in fractions of the axes."""
  axes.plot(
    [x, 1.0, 1.04],
    [y, y, label_height],
    ":",
    color=GRAY,
    linewidth=0.7,
    transform=axes.transAxes,
    clip_on=False,
    scalex=False,
    scaley=False,
  )


def spread(heights: Sequence[float], gap: float) -> list[float]:
  """Move heights up, in order, until they are `gap` apart, and down from 1 if they exceed it."""
  order = np.argsort(heights, kind="stable")
  offset = gap * np.arange(len(heights))
  ascending = np.asarray(heights, np.float64)[order]
  moved_up = np.maximum.accumulate(ascending - offset)
  highest_first = 1 - gap * (len(heights) - 1)
  result = np.empty_like(moved_up)
  result[order] = np.minimum(moved_up, highest_first) + offset
  return result.tolist()


def _draw_legend(axes: Axes, members: Sequence[_MemberCurves]) -> None:
  """Explain thick lines, thin lines and crosses, as far as the plot has them."""
  handles: list[Line2D] = []
  if any(len(member.held_out_S2) for member in members):
    handles.append(Line2D([], [], color=GRAY, label="held out", linewidth=1.6))
  if any(len(member.train_S2) for member in members):
    handles.append(Line2D([], [], color=GRAY, label="training", linewidth=0.6))
  if any(member.diverged for member in members):
    cross = Line2D([], [], color=GRAY, label="diverged", linewidth=0, marker="x", mew=1.8)
    handles.append(cross)
  if handles:
    axes.legend(handles=handles, frameon=False, fontsize=9, loc="upper right")


def _draw_color_bar(figure: Figure, axes: Axes, num_members: int) -> None:
  """Draw the colours of the ranks right of the plot."""
  norm = BoundaryNorm(np.arange(num_members + 1) + 0.5, BEST_TO_WORST.N)
  bar = figure.colorbar(ScalarMappable(norm, BEST_TO_WORST), ax=axes, aspect=40)
  bar.ax.invert_yaxis()
  ranks = {1, num_members, *range(10, num_members - 3, 10)}
  bar.set_ticks(sorted(ranks))
  bar.ax.minorticks_off()
  bar.ax.tick_params(labelsize=8)
  bar.set_label("rank by best held-out loss", fontsize=9)
