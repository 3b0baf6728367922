"""Coordinate check of the parametrization: how far activations move with the width.

  python tools/inspect/coordinate_check.py configs/base.yml [key=value ...] [--plot FILE.png]

For 1, 2, 4 and 8 times the widths of the config, and for both parametrizations, the model takes
five steps at its peak learning rate. The table has the root mean square of the change of the
activations of each module since the initial weights, at each width, and the slope of its logarithm
against that of the width. With muP slopes are near 0 (or below, in what shrinks towards its limit);
with the standard parametrization activations grow with the width.

Source: Yang et al., Tensor Programs V (2022), appendix D.1.
"""

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.traverse_util import flatten_dict
from matplotlib.ticker import NullLocator

from maxlite.config import Config, load_config
from maxlite.config.schema import flatten
from maxlite.data.batch import Batch
from maxlite.errors import exit_on_user_error
from maxlite.metrics.plots.figure import new_figure, save_figure, style_axes
from maxlite.models import Decoder
from maxlite.runs.open_run import open_run_data
from maxlite.sharding.pytree import PyTree
from maxlite.training.program import build_program
from maxlite.training.spec import spec_of

NUM_STEPS = 5
FACTORS = (1, 2, 4, 8)
WIDTHS = (
  "base_emb_dim",
  "base_mlp_dim",
  "base_moe_mlp_dim",
  "base_num_query_heads",
  "base_num_kv_heads",
)
MODULES = ("embed", "attention", "mlp", "moe", "final_norm")  # whose outputs are compared
PARAMETRIZATIONS = ("standard", "mup")


def main() -> int:
  argv = sys.argv[1:]
  plot = None
  if "--plot" in argv:
    option = argv.index("--plot")
    plot = Path(argv[option + 1])
    argv = argv[:option] + argv[option + 2 :]
  with exit_on_user_error("coordinate_check"):
    base = load_config(argv)
    moved = {kind: measure(base, argv, kind) for kind in PARAMETRIZATIONS}
  for kind, changes in moved.items():
    print(table(kind, base.model.base_emb_dim, changes))
  if plot:
    draw(plot, base.model.base_emb_dim, moved)
  return 0


def measure(
  base: Config,
  argv: Sequence[str],
  kind: str,
) -> dict[str, list[float]]:
  """The change of every module's output, at each of FACTORS."""
  changes: dict[str, list[float]] = {}
  for factor in FACTORS:
    cfg = load_config([*argv, *width_keys(base, factor, kind)])
    for module, change in activation_changes(cfg).items():
      changes.setdefault(module, []).append(change)
  return changes


def width_keys(base: Config, factor: int, kind: str) -> list[str]:
  """Settings for `factor` times the widths of `base`, whose width is the base width of muP."""
  sizes = flatten(base.model)
  keys: dict[str, Any] = {}
  for key in WIDTHS:
    keys[key] = sizes[key] * factor
  keys["parametrization"] = kind
  keys["mup_base_emb_dim"] = 0
  if kind == "mup":
    keys["mup_base_emb_dim"] = sizes["base_emb_dim"]
  keys["warmup_steps_fraction"] = 0
  keys["lr_schedule_type"] = "constant"
  keys["scan_layers"] = "false"
  return [f"{key}={value}" for key, value in keys.items()]


def activation_changes(cfg: Config, num_steps: int = NUM_STEPS) -> dict[str, float]:
  """RMS of the change of each module's output on the first batch, and of the logits."""
  program = build_program(spec_of(cfg), command=cfg)
  state = program.init(0)
  stream = open_run_data(cfg, program).train_stream()
  batches = [program.place(next(stream)) for _ in range(num_steps)]
  stream.close()

  outputs_of = jax.jit(functools.partial(module_outputs, program.model))
  before = outputs_of(state.params, batches[0])
  for batch in batches:
    state, _ = program.step(state, batch)
  after = outputs_of(state.params, batches[0])
  changes = {}
  for module in before:
    changes[module] = root_mean_square(after[module] - before[module])
  return changes


def module_outputs(
  model: Decoder,
  params: PyTree,
  batch: Batch,
) -> dict[str, jax.Array]:
  """The outputs of MODULES by path, and the logits."""
  logits, sown = model.apply(
    {"params": params},
    batch.tokens_BT,
    batch.segment_BT,
    batch.position_BT,
    capture_intermediates=is_compared,
    mutable="intermediates",
  )
  outputs: dict[str, jax.Array] = {}
  for (*path, _), (output, *_) in flatten_dict(sown["intermediates"]).items():
    name = "/".join(path)
    if isinstance(output, tuple):  # a mixture returns its sums for the losses too
      outputs[name] = output[0]
    else:
      outputs[name] = output
  outputs["logits"] = logits
  return outputs


def is_compared(module: nn.Module, method: str) -> bool:
  return module.name in MODULES and method == "__call__"


def root_mean_square(x: jax.Array) -> float:
  squares = np.square(np.asarray(x, np.float64))
  return float(np.sqrt(np.mean(squares)))


def slope(changes: Sequence[float]) -> float:
  """The slope of the logarithm of the change against the logarithm of the width."""
  degree = 1
  gradient, _ = np.polyfit(np.log(FACTORS), np.log(changes), degree)
  return float(gradient)


def table(
  kind: str,
  width: int,
  changes: dict[str, list[float]],
) -> str:
  """A line per module: its change at each width, and the slope."""
  head = f"{kind:24}"
  for factor in FACTORS:
    head += f"{width * factor:>9}"
  lines = [f"{head}    slope"]
  for module, by_width in changes.items():
    line = f"{module:24}"
    for change in by_width:
      line += f"{change:9.4f}"
    lines.append(f"{line}{slope(by_width):9.2f}")
  return "\n".join(lines)


def draw(
  png_path: Path,
  width: int,
  moved: dict[str, dict[str, list[float]]],
) -> None:
  """A plot per parametrization, with a line per module over the width."""
  figure = new_figure(9, 3.4, w_pad=0.1)
  widths = [width * factor for factor in FACTORS]
  for axes, (kind, changes) in zip(figure.subplots(1, 2, sharey=True), moved.items(), strict=True):
    for n, (module, line) in enumerate(changes.items()):
      axes.loglog(
        widths,
        line,
        "o-",
        color=f"C{n}",
        label=module,
        markersize=3,
      )
    axes.set(title=kind, xlabel="base_emb_dim")
    style_axes(axes)
    axes.set_xticks(widths, [str(each) for each in widths])
    axes.xaxis.set_minor_locator(NullLocator())
  figure.axes[0].set_ylabel(f"RMS change in {NUM_STEPS} steps")
  handles, labels = figure.axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside right", fontsize=8)
  save_figure(figure, png_path)


if __name__ == "__main__":
  sys.exit(main())
