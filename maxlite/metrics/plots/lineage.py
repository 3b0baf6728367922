"""The copies and hyperparameters of population-based training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib import colormaps

from maxlite.metrics.plots.figure import (
  GRAY,
  LARGE_RANGE,
  Color,
  new_figure,
  save_figure,
  style_steps,
)
from maxlite.metrics.step_row import LoggedRow

_ARROW = {"arrowstyle": "-|>", "color": GRAY, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 1}


class _Segment(NamedTuple):
  """The time of a member from one copy to the next.

  Attributes:
    start: the first step.
    end: the last step.
    ancestor: the member from which its state descends.
    values: its hyperparameters.
  """

  start: int
  end: int
  ancestor: str
  values: Mapping[str, float]


def draw_lineage(
  final: Mapping[str, Mapping[str, float]],
  rows: Sequence[LoggedRow],
  last_step: int,
  png_path: Path,
) -> None:
  """Draw which member continues from which in population-based training.

  There is a line per member with an arrow per copy, and below it every hyperparameter over steps. A
  colour is an ancestor that has descendants at the end; others are gray.

  Args:
    final: the members' hyperparameters at the end, by name.
    rows: the rows of `population.LINEAGE`, by step.
    last_step: the last step of the run.
    png_path: where the plot is saved.
  """
  segments = _segments(final, rows, last_step)
  survivors = {own[-1].ancestor for own in segments.values()}
  colors: dict[str, Color] = {}
  for index, name in enumerate(sorted(survivors)):
    colors[name] = colormaps["tab10"](index % 10)
  keys = list(next(iter(final.values())))
  ratios = [1 + 0.25 * len(final), *[2] * len(keys)]
  figure = new_figure(9, sum(ratios) + 0.5, w_pad=0.12, h_pad=0.08)
  panels = figure.subplots(len(ratios), 1, sharex=True, height_ratios=ratios, squeeze=False)[:, 0]
  lines = panels[0]
  height_of = {name: height for height, name in enumerate(segments)}
  for name, own in segments.items():
    for segment in own:
      color = colors.get(segment.ancestor, GRAY)
      lines.hlines(height_of[name], segment.start, segment.end, color=color, linewidth=1.8)
      for axes, key in zip(panels[1:], keys, strict=True):
        axes.hlines(segment.values[key], segment.start, segment.end, color=color, linewidth=1.8)
  for row in rows:
    tail = (row["step"], height_of[row["from"]])
    head = (row["step"], height_of[row["member"]])
    lines.annotate("", head, tail, arrowprops=_ARROW)
  lines.set_yticks(range(len(segments)), list(segments))
  lines.invert_yaxis()
  for axes, key in zip(panels[1:], keys, strict=True):
    axes.set_ylabel(key)
    low, high = axes.dataLim.intervaly
    if low > 0 and high > LARGE_RANGE * low:
      axes.set_yscale("log")
  for axes in panels:
    style_steps(axes)
    axes.label_outer()
  save_figure(figure, png_path)


def _segments(
  final: Mapping[str, Mapping[str, float]], rows: Sequence[LoggedRow], last_step: int
) -> dict[str, list[_Segment]]:
  """Per member, its time from one copy to the next."""
  ancestor_of = {name: name for name in final}
  start_of = dict.fromkeys(final, 0)
  segments: dict[str, list[_Segment]] = {name: [] for name in final}
  for row in rows:
    name = row["member"]
    step = row["step"]
    segments[name].append(_Segment(start_of[name], step, ancestor_of[name], row["before"]))
    start_of[name] = step
    ancestor_of[name] = ancestor_of[row["from"]]
  for name, own in segments.items():
    own.append(_Segment(start_of[name], last_step, ancestor_of[name], final[name]))
  return segments
