"""Held-out loss by width and learning rate, from ensembles whose members differ in both.

  python tools/inspect/learning_rate_transfer.py RUN_FOLDER ... [--plot FILE.png]

Prints one table per run, with the best rate of every width marked by `*`. The members differ in
base_emb_dim and learning_rate, as those of configs/ensemble/widths.yml.
"""

import argparse
import json
import math
from pathlib import Path

from matplotlib.axes import Axes

from maxlite.metrics.plots.figure import new_figure, save_figure, style_axes

Losses = dict[int, dict[float, float]]  # width -> learning rate -> held-out loss


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("run_folders", nargs="+", type=Path)
  parser.add_argument("--plot", type=Path)
  args = parser.parse_args()
  runs = {folder.name: read_losses(folder) for folder in args.run_folders}
  for name, losses in runs.items():
    print(table(name, losses))
  if args.plot:
    draw(args.plot, runs)


def read_losses(run_folder: Path) -> Losses:
  """The final held-out loss of every member; infinite where there is none."""
  losses: Losses = {}
  for line in (run_folder / "members.jsonl").read_text("utf-8").splitlines():
    member = json.loads(line)
    width = member["overrides"]["base_emb_dim"]
    rate = member["overrides"]["learning_rate"]
    loss = member["final_loss"]
    if loss is None:
      loss = math.inf
    losses.setdefault(width, {})[rate] = loss
  return {width: dict(sorted(losses[width].items())) for width in sorted(losses)}


def best_rate(by_rate: dict[float, float]) -> float:
  """The learning rate with the lowest loss."""
  return min(by_rate, key=by_rate.__getitem__)


def table(name: str, losses: Losses) -> str:
  """A line per width: the loss at each learning rate."""
  first = next(iter(losses.values()))
  head = f"{name:>16}"
  for rate in first:
    head += f"{rate:9g}"
  lines = [head]
  for width, by_rate in losses.items():
    title = f"width {width}"
    line = f"{title:>16}"
    for rate in first:
      mark = "*" if rate == best_rate(by_rate) else " "
      line += f"{by_rate[rate]:8.3f}{mark}"
    lines.append(line)
  return "\n".join(lines)


def draw_line(
  axes: Axes,
  n: int,
  width: int,
  by_rate: dict[float, float],
) -> None:
  """The n-th line of a plot, from light to dark, with a star at the best learning rate."""
  color = (0.75 - 0.22 * n, 0.55 - 0.12 * n, 0.35 + 0.1 * n)
  axes.semilogx(
    by_rate.keys(),
    by_rate.values(),
    "o-",
    markersize=3,
    color=color,
    label=width,
  )
  best = best_rate(by_rate)
  axes.plot(
    best,
    by_rate[best],
    "*",
    color=color,
    markersize=11,
  )


def draw(png_path: Path, runs: dict[str, Losses]) -> None:
  """A plot per run, with a line per width."""
  figure = new_figure(4 * len(runs), 3.4, w_pad=0.1)
  all_axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
  for axes, (name, losses) in zip(all_axes, runs.items(), strict=True):
    for n, (width, by_rate) in enumerate(losses.items()):
      draw_line(axes, n, width, by_rate)
    axes.set(title=name, xlabel="learning_rate")
    style_axes(axes)
  lowest = math.inf
  for losses in runs.values():
    for by_rate in losses.values():
      lowest = min(lowest, *by_rate.values())
  all_axes[0].set(ylabel="held-out loss [nats per token]", ylim=(None, 1.6 * lowest))
  all_axes[-1].legend(
    title="base_emb_dim",
    fontsize=8,
    title_fontsize=8,
  )
  save_figure(figure, png_path)


if __name__ == "__main__":
  main()
