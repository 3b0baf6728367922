"""When which phase of a run trains what: as text, and as a picture with the losses under it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from maxlite.metrics.plots.curves import GRAY, curve, save, tidy
from maxlite.metrics.writers import read_rows

Span = tuple[int, int, str]  # first and last step of a turn, and its phase
BAR, NO_BAR = "█", "·"
LOSSES = {"loss": ".", "draft_loss": "x"}  # with their markers
MANY_TURNS = 60  # above that, lines between turns would hide the curves


def timeline_lines(spans: Sequence[Span], width: int = 60) -> list[str]:
  """A row of bars per phase, in the order of their first turns, under a ruler of steps."""
  num_steps = spans[-1][1]
  width = min(width, num_steps)
  names = list(dict.fromkeys(name for _, _, name in spans))
  indent = max(map(len, names)) + 2
  lines = [" " * indent + "1" + str(num_steps).rjust(width - 1)]
  for name in names:
    bars = [NO_BAR] * width
    for first, last, of in spans:
      columns = range((first - 1) * width // num_steps, (last - 1) * width // num_steps + 1)
      for column in columns if of == name else ():
        bars[column] = BAR
    lines.append(name.ljust(indent) + "".join(bars))
  return lines


def spans_of_rows(rows: Sequence[dict], names: Sequence[str]) -> list[Span]:
  """The turns as far as logged rows tell them: each begins after the last row of the one before."""
  spans: list[Span] = []
  for row in (row for row in rows if "phase" in row):
    name, step = names[int(row["phase"])], int(row["step"])
    if spans and spans[-1][2] == name:
      spans[-1] = (spans[-1][0], step, name)
    else:
      spans.append((spans[-1][1] + 1 if spans else 1, step, name))
  return spans


def draw_timeline(
  metrics_path: Path, png_path: Path, groups: Mapping[str, Sequence[str]], spans: Sequence[Span]
) -> None:
  """Draws which group moves when, coloured by the phase that moves it, and the losses below.

  `groups` are by phase the regexes of what it trains.
  """
  rows = read_rows(metrics_path)
  regexes = list(dict.fromkeys(regex for own in groups.values() for regex in own))
  height = 0.8 + 0.32 * len(regexes)
  layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
  figure = Figure(figsize=(10, height + 3.6), layout=layout, dpi=150)
  top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[height, 3.2])
  palette = colormaps["tab10"]
  colours = {name: palette(n % palette.N) for n, name in enumerate(groups)}
  _draw_groups(top, regexes, groups, spans, colours)
  _draw_losses(bottom, rows, spans, colours)
  save(figure, png_path)


def _draw_groups(
  axes: Axes,
  regexes: Sequence[str],
  groups: Mapping[str, Sequence[str]],
  spans: Sequence[Span],
  colours: Mapping[str, tuple],
) -> None:
  for row, regex in enumerate(regexes):
    for name, own in groups.items():
      turns = [(first - 0.5, last - first + 1) for first, last, of in spans if of == name]
      if regex in own:
        axes.broken_barh(turns, (row - 0.38, 0.76), color=colours[name], label=name)
  axes.set_yticks(range(len(regexes)), regexes, fontsize=8)
  axes.set_ylim(len(regexes) - 0.5, -0.5)
  axes.set_title("what is trained, and by which phase", fontsize=9, color=GRAY)
  handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
  axes.legend(handles.values(), handles, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
  axes.spines[["top", "right"]].set_visible(False)


def _draw_losses(
  axes: Axes, rows: Sequence[dict], spans: Sequence[Span], colours: Mapping[str, tuple]
) -> None:
  steps, loss = curve(rows, "loss")
  axes.plot(steps, loss, color=GRAY, linewidth=0.8, alpha=0.5)
  for name, colour in colours.items():
    own = [row for row in rows if any(a <= row["step"] <= b for a, b, of in spans if of == name)]
    for metric, marker in LOSSES.items():
      axes.plot(*curve(own, metric), marker, color=colour, markersize=4)
  for first, _, name in spans if len(spans) <= MANY_TURNS else ():
    axes.axvline(first - 0.5, color=colours[name], linewidth=0.6, alpha=0.4)
  steps, loss = curve(rows, "eval_loss")
  if steps.size:
    axes.plot(steps, loss, "o-", color="black", markersize=4, linewidth=1, label="held out")
    axes.legend(frameon=False)
  axes.set_xlabel("step")
  axes.set_ylabel("loss (nats per token)")
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  tidy(axes)
