"""Held-out loss by width and learning rate, from ensembles whose members differ in both.

  python tools/inspect/learning_rate_transfer.py RUN_FOLDER ... [--plot FILE.png]

Prints one table per run, with the best rate of every width marked by `*`. The members differ in
base_emb_dim and learning_rate, as those of configs/ensemble/widths.yml.
"""

import argparse
import json
import math
from pathlib import Path

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
    keys, loss = member["overrides"], member["final_loss"]
    of_width = losses.setdefault(keys["base_emb_dim"], {})
    of_width[keys["learning_rate"]] = math.inf if loss is None else loss
  return {width: dict(sorted(losses[width].items())) for width in sorted(losses)}


def table(name: str, losses: Losses) -> str:
  rates = list(next(iter(losses.values())))
  lines = [f"{name:>16}" + "".join(f"{rate:9g}" for rate in rates)]
  for width, of_width in losses.items():
    best = min(of_width, key=of_width.__getitem__)
    cells = [f"{of_width[rate]:8.3f}{'*' if rate == best else ' '}" for rate in rates]
    lines.append(f"{f'width {width}':>16}" + "".join(cells))
  return "\n".join(lines)


def draw(png_path: Path, runs: dict[str, Losses]) -> None:
  """A plot per run, with a line per width."""
  figure = new_figure(4 * len(runs), 3.4, w_pad=0.1)
  all_axes = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
  for axes, (name, losses) in zip(all_axes, runs.items(), strict=True):
    for n, (width, of_width) in enumerate(losses.items()):
      color = (0.75 - 0.22 * n, 0.55 - 0.12 * n, 0.35 + 0.1 * n)
      axes.semilogx(
        of_width.keys(), of_width.values(), "o-", markersize=3, color=color, label=width
      )
      best = min(of_width, key=of_width.__getitem__)
      axes.plot(best, of_width[best], "*", color=color, markersize=11)
    axes.set(title=name, xlabel="learning_rate")
    style_axes(axes)
  finite = [x for losses in runs.values() for row in losses.values() for x in row.values()]
  all_axes[0].set(ylabel="held-out loss [nats per token]", ylim=(None, 1.6 * min(finite)))
  all_axes[-1].legend(title="base_emb_dim", fontsize=8, title_fontsize=8)
  save_figure(figure, png_path)


if __name__ == "__main__":
  main()
