"""The plot of population-based training: who continues from whom, and the hyperparameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import colormaps
from matplotlib.axes import Axes

from maxlite.metrics.plots.ensemble_curves import LARGE_RANGE
from maxlite.metrics.plots.figure import GRAY, new_figure, save_figure, style_steps

_COLORS = [colormaps["tab10"](n) for n in range(10)]
Color = str | tuple[float, ...]


class _Segment(NamedTuple):
  """A member between two exchanges."""

  start: int
  end: int
  ancestor: str
  values: Mapping[str, float]


def draw_lineage(
  final: Mapping[str, Mapping[str, float]],
  rows: Sequence[Mapping[str, Any]],
  last_step: int,
  png_path: Path,
) -> None:
  """Draw a line per member with an arrow per copy, and below it every hyperparameter over steps.

  A colour is an ancestor that has descendants at the end; others are gray.

  Args:
    final: the members' hyperparameters at the end, by name.
    rows: of `population.LINEAGE`, by step.
  """
  segments = _segments(final, rows, last_step)
  survivors = sorted({own[-1].ancestor for own in segments.values()})
  colors = {name: _COLORS[n % len(_COLORS)] for n, name in enumerate(survivors)}
  keys = list(next(iter(final.values())))
  height = 1 + 0.25 * len(final)
  figure = new_figure(9, height + 2 * len(keys) + 0.5, w_pad=0.12, h_pad=0.08)
  ratios = [height, *[2] * len(keys)]
  panels = figure.subplots(1 + len(keys), 1, sharex=True, height_ratios=ratios, squeeze=False)
  above, *below = panels.flat
  _draw_members(above, segments, rows, colors)
  for axes, key in zip(below, keys, strict=True):
    _draw_values(axes, key, segments, colors)
  style_steps(panels.flat[-1])
  save_figure(figure, png_path)


def _segments(
  final: Mapping[str, Mapping[str, float]], rows: Sequence[Mapping[str, Any]], last_step: int
) -> dict[str, list[_Segment]]:
  """Per member, its time from one copy to the next."""
  ancestor_of = {name: name for name in final}
  start_of = dict.fromkeys(final, 0)
  segments: dict[str, list[_Segment]] = {name: [] for name in final}
  for row in rows:
    name, step = row["member"], row["step"]
    segments[name].append(_Segment(start_of[name], step, ancestor_of[name], row["before"]))
    start_of[name], ancestor_of[name] = step, ancestor_of[row["from"]]
  for name, own in segments.items():
    own.append(_Segment(start_of[name], last_step, ancestor_of[name], final[name]))
  return segments


def _draw_members(
  axes: Axes,
  segments: Mapping[str, Sequence[_Segment]],
  rows: Sequence[Mapping[str, Any]],
  colors: Mapping[str, Color],
) -> None:
  height_of = {name: y for y, name in enumerate(segments)}
  for name, own in segments.items():
    for segment in own:
      color = colors.get(segment.ancestor, GRAY)
      axes.hlines(height_of[name], segment.start, segment.end, color=color, linewidth=2.5)
  arrow = {"arrowstyle": "-|>", "color": GRAY, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 1}
  for row in rows:
    start, end = ((row["step"], height_of[row[key]]) for key in ("from", "member"))
    axes.annotate("", end, start, arrowprops=arrow)
  axes.set_yticks(range(len(segments)), list(segments))
  axes.invert_yaxis()
  style_steps(axes)
  axes.set_xlabel("")
  axes.grid(visible=False, axis="y")


def _draw_values(
  axes: Axes, key: str, segments: Mapping[str, Sequence[_Segment]], colors: Mapping[str, Color]
) -> None:
  values = [segment.values[key] for own in segments.values() for segment in own]
  if min(values) > 0 and max(values) > LARGE_RANGE * min(values):
    axes.set_yscale("log")
  for own in segments.values():
    for segment in own:
      color = colors.get(segment.ancestor, GRAY)
      axes.hlines(segment.values[key], segment.start, segment.end, color=color, linewidth=1.4)
  axes.set_ylabel(key)
  style_steps(axes)
  axes.set_xlabel("")
