"""Coordinate check of the parametrization: how far activations move with the width.

  python tools/inspect/coordinate_check.py configs/base.yml [key=value ...] [--plot FILE.png]

For 1, 2, 4 and 8 times the widths of the config, and for both parametrizations, the model takes
five steps at its peak learning rate. The table has the root mean square of the change of the
activations of each module since the initial weights, at each width, and the slope of its logarithm
against that of the width. With muP slopes are near 0 (or below, in what shrinks towards its limit);
with the standard parametrization activations grow with the width.

Source: Yang et al., Tensor Programs V (2022), appendix D.1.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from matplotlib.ticker import NullLocator

from maxlite.config import Config, exit_on_user_error, load_config
from maxlite.config.schema import flatten
from maxlite.data.batch import Batch
from maxlite.metrics.plots.figure import new_figure, save_figure, style_axes
from maxlite.runs.open_run import open_trainer_data
from maxlite.training.trainer import build_trainer

NUM_STEPS, FACTORS = 5, (1, 2, 4, 8)
WIDTHS = (
  *("base_emb_dim", "base_mlp_dim", "base_moe_mlp_dim"),
  *("base_num_query_heads", "base_num_kv_heads"),
)
MODULES = ("embed", "attention", "mlp", "moe", "final_norm")  # whose outputs are compared
PARAMETRIZATIONS = ("standard", "mup")


def main() -> int:
  argv = sys.argv[1:]
  plot = Path(argv.pop(argv.index("--plot") + 1)) if "--plot" in argv else None
  argv = [word for word in argv if word != "--plot"]
  with exit_on_user_error("coordinate_check"):
    base = load_config(argv)
    moved = {kind: measure(base, argv, kind) for kind in PARAMETRIZATIONS}
  for kind, changes in moved.items():
    print(table(kind, base.model.base_emb_dim, changes))
  if plot:
    draw(plot, base.model.base_emb_dim, moved)
  return 0


def measure(base: Config, argv: Sequence[str], kind: str) -> dict[str, list[float]]:
  """The change of every module's output, at each of FACTORS."""
  changes = [activation_changes(load_config([*argv, *width_keys(base, n, kind)])) for n in FACTORS]
  return {module: [change[module] for change in changes] for module in changes[0]}


def width_keys(base: Config, factor: int, kind: str) -> list[str]:
  """Settings for `factor` times the widths of `base`, whose width is the base width of muP."""
  sizes = flatten(base.model)
  keys: dict[str, Any] = {key: sizes[key] * factor for key in WIDTHS}
  keys["parametrization"] = kind
  keys["mup_base_emb_dim"] = sizes["base_emb_dim"] if kind == "mup" else 0
  keys |= {"warmup_steps_fraction": 0, "lr_schedule_type": "constant", "scan_layers": "false"}
  return [f"{key}={value}" for key, value in keys.items()]


def activation_changes(cfg: Config, num_steps: int = NUM_STEPS) -> dict[str, float]:
  """RMS of the change of each module's output on the first batch, and of the logits."""
  trainer = build_trainer(cfg)
  state, stream = trainer.init_state(), open_trainer_data(trainer).train_stream()
  batches = [trainer.place(next(stream)) for _ in range(num_steps)]
  stream.close()

  @jax.jit
  def activations(params: Any, batch: Batch) -> dict[str, jax.Array]:
    logits, sown = trainer.model.apply(
      {"params": params},
      batch.tokens_BT,
      batch.segment_BT,
      batch.position_BT,
      capture_intermediates=lambda module, method: module.name in MODULES and method == "__call__",
      mutable="intermediates",
    )
    return {**_by_module(sown["intermediates"]), "logits": logits}

  before = activations(state.params, batches[0])
  for batch in batches:
    state, _ = trainer.train_step(state, batch)
  after = activations(state.params, batches[0])

  return {module: _rms(after[module] - before[module]) for module in before}


def _by_module(intermediates: Any) -> dict[str, jax.Array]:
  """The first output of each module, by its path; a mixture also returns sums for the losses."""
  outputs = {}
  for path, (output, *_) in flatten_dict(intermediates).items():
    first = output[0] if isinstance(output, tuple) else output
    outputs["/".join(path[:-1])] = first
  return outputs


def _rms(x: jax.Array) -> float:
  return float(np.sqrt(np.mean(np.square(np.asarray(x, np.float64)))))


def slope(changes: Sequence[float]) -> float:
  """Of the logarithm of the change against the logarithm of the width."""
  return float(np.polyfit(np.log(FACTORS), np.log(changes), 1)[0])


def table(kind: str, width: int, changes: dict[str, list[float]]) -> str:
  head = f"{kind:24}" + "".join(f"{width * factor:>9}" for factor in FACTORS) + "    slope"

  def row(module, x):
    return f"{module:24}" + "".join(f"{v:9.4f}" for v in x) + f"{slope(x):9.2f}"

  return "\n".join([head, *(row(*entry) for entry in changes.items())])


def draw(png_path: Path, width: int, moved: dict[str, dict[str, list[float]]]) -> None:
  """A plot per parametrization, with a line per module over the width."""
  figure, widths = new_figure(9, 3.4, w_pad=0.1), [width * factor for factor in FACTORS]
  for axes, (kind, changes) in zip(figure.subplots(1, 2, sharey=True), moved.items(), strict=True):
    for n, (module, line) in enumerate(changes.items()):
      axes.loglog(widths, line, "o-", color=f"C{n}", label=module, markersize=3)
    axes.set(title=kind, xlabel="base_emb_dim")
    style_axes(axes)
    axes.set_xticks(widths, map(str, widths))
    axes.xaxis.set_minor_locator(NullLocator())
  figure.axes[0].set_ylabel(f"RMS change in {NUM_STEPS} steps")
  figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right", fontsize=8)
  save_figure(figure, png_path)


if __name__ == "__main__":
  sys.exit(main())
