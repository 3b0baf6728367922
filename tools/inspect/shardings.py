"""Print the sharding of every parameter.

  python tools/inspect/shardings.py configs/base.yml [key=value ...]

One line per parameter: logical axes, PartitionSpec, shape and bytes per device. For a mesh larger
than this machine, set JAX_NUM_CPU_DEVICES=N.
"""

import sys

from rich.console import Console
from rich.table import Table

from maxlite.config import exit_on_user_error, main_config


def main() -> int:
  cfg = main_config(sys.argv[1:], "shardings", needs_data=False)
  # Importing JAX is slow: only after the command line is validated.
  from maxlite.training.trainer import build_trainer

  with exit_on_user_error("shardings"):
    trainer = build_trainer(cfg)
  degrees = " x ".join(f"{axis}={size}" for axis, size in trainer.mesh.shape.items())
  table = Table(title=f"{trainer.mesh.size} devices: {degrees}", box=None, title_justify="left")
  for column in ("parameter", "logical axes", "spec", "shape"):
    table.add_column(column)
  table.add_column("bytes per device", justify="right")
  for placement in trainer.parameter_shardings:
    table.add_row(
      placement.path,
      " ".join(placement.names),
      str(placement.spec),
      " ".join(map(str, placement.shape)),
      f"{placement.bytes_per_device:,}",
    )
  total = sum(placement.num_bytes for placement in trainer.parameter_shardings)
  local = sum(placement.bytes_per_device for placement in trainer.parameter_shardings)
  table.add_row("all", "", "", f"{total:,} bytes in total", f"{local:,}", style="bold")
  # Wide enough that nothing is truncated, whatever the terminal.
  Console(width=200, highlight=False, markup=False).print(table)
  return 0


if __name__ == "__main__":
  sys.exit(main())
