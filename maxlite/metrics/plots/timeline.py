"""A plot of the phases of a run above its loss curves."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes

from maxlite.metrics.plots.figure import GRAY, curve_of, new_figure, save_figure, style_steps
from maxlite.metrics.writers import read_rows

Span = tuple[int, int, str]  # first step, last step, phase
LOSSES = {"loss": ".", "draft_loss": "x"}  # with their markers
MAX_SPAN_LINES = 60  # with more spans, the lines between them would hide the curves


def draw_timeline(
  metrics_path: Path,
  png_path: Path,
  groups: Mapping[str, Sequence[str]],
  spans: Sequence[Span],
) -> None:
  """Draw when each group of parameters is trained, coloured by phase, and the losses below.

  Args:
    groups: phase -> regexes of the parameters it trains.
  """
  regexes = list(dict.fromkeys(regex for trained in groups.values() for regex in trained))
  height = 0.8 + 0.32 * len(regexes)
  figure = new_figure(10, height + 3.6, w_pad=0.12, h_pad=0.08)
  top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[height, 3.2])
  palette = colormaps["tab10"]
  colors = {name: palette(n % palette.N) for n, name in enumerate(groups)}
  _draw_groups(top, regexes, groups, spans, colors)
  _draw_losses(bottom, read_rows(metrics_path), spans, colors)
  save_figure(figure, png_path)


def _draw_groups(
  axes: Axes,
  regexes: Sequence[str],
  groups: Mapping[str, Sequence[str]],
  spans: Sequence[Span],
  colors: Mapping[str, tuple],
) -> None:
  for line, regex in enumerate(regexes):
    for name, trained in groups.items():
      bars = [(first - 0.5, last - first + 1) for first, last, phase in spans if phase == name]
      if regex in trained:
        axes.broken_barh(bars, (line - 0.38, 0.76), color=colors[name], label=name)
  axes.set_yticks(range(len(regexes)), regexes, fontsize=8)
  axes.set_ylim(len(regexes) - 0.5, -0.5)
  axes.set_title("trained parameters by phase", fontsize=9, color=GRAY)
  handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
  axes.legend(handles.values(), handles, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
  axes.spines[["top", "right"]].set_visible(False)


def _draw_losses(
  axes: Axes, rows: Sequence[dict], spans: Sequence[Span], colors: Mapping[str, tuple]
) -> None:
  axes.plot(*curve_of(rows, "loss").T, color=GRAY, linewidth=0.8, alpha=0.5)
  for name, color in colors.items():
    steps = [range(first, last + 1) for first, last, phase in spans if phase == name]
    of_phase = [row for row in rows if any(row["step"] in span for span in steps)]
    for metric, marker in LOSSES.items():
      axes.plot(*curve_of(of_phase, metric).T, marker, color=color, markersize=4)
  for first, _, name in spans if len(spans) <= MAX_SPAN_LINES else ():
    axes.axvline(first - 0.5, color=colors[name], linewidth=0.6, alpha=0.4)
  eval_S2 = curve_of(rows, "eval_loss")
  if eval_S2.size:
    axes.plot(*eval_S2.T, "o-", color="black", markersize=4, linewidth=1, label="held out")
    axes.legend(frameon=False)
  axes.set_ylabel("loss (nats per token)")
  style_steps(axes)
