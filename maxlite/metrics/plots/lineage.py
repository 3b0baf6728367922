"""The plot of population-based training: who continues from whom, and the hyperparameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps

from maxlite.metrics.plots.ensemble_curves import LARGE_RANGE
from maxlite.metrics.plots.figure import GRAY, new_figure, save_figure, style_steps

_ARROW = {"arrowstyle": "-|>", "color": GRAY, "linewidth": 0.8, "shrinkA": 1, "shrinkB": 1}
Segment = tuple[int, int, str, Mapping[str, float]]  # start, end, ancestor, hyperparameters


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
