"""Creation, style and saving of figures, their colours, and the data of one curve."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator

from maxlite.metrics.step_row import LoggedRow
from maxlite.storage.file_io import write_atomically

BLUE = "#2a6fbb"
ORANGE = "#d95f02"
GRAY = "#555555"
Color = tuple[float, float, float, float]  # red, green, blue, alpha
# From dark to light, without the lightest fifth, which is invisible on white.
BEST_TO_WORST = ListedColormap(colormaps["viridis"](np.linspace(0, 0.82, 256)))
LARGE_RANGE = 10  # a larger ratio of values gives a log scale
CROWD = 12  # with more members of an ensemble, lines are thinner


def new_figure(width: float, height: float, *, w_pad: float, h_pad: float | None = None) -> Figure:
  """Create a figure of `width` x `height` inches with padding between its plots."""
  layout = ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad)
  return Figure(figsize=(width, height), layout=layout, dpi=150)


def save_figure(figure: Figure, png_path: Path) -> None:
  """Save atomically."""
  content = io.BytesIO()
  figure.savefig(content, format="png")
  write_atomically(png_path, content.getvalue())


def style_axes(axes: Axes) -> None:
  """Style a plot: no frame above and to the right, a faint grid, small labels."""
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(alpha=0.25, linewidth=0.6)
  axes.tick_params(which="both", labelsize=8)


def style_steps(axes: Axes) -> None:
  """Style a plot over steps."""
  axes.set_xlabel("step")
  axes.xaxis.set_major_locator(
    MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
  )
  style_axes(axes)


def curve_of(rows: Sequence[LoggedRow], metric: str) -> np.ndarray:
  """[S, 2] array of (step, value) of the rows that have the metric; null becomes NaN."""
  points = [(row["step"], row[metric]) for row in rows if metric in row]
  return np.asarray(points, np.float64).reshape(-1, 2)


def shorten(name: str, limit: int = 28) -> str:
  """Cut a name to at most `limit` characters."""
  if len(name) <= limit:
    return name
  return f"{name[: limit - 1]}…"
