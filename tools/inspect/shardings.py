"""How every parameter lies on the mesh.

  python tools/inspect/shardings.py configs/base.yml [key=value ...]

One line per parameter with its logical axes, its spec, its shape and its bytes on each device. Give
a mesh larger than this machine with JAX_NUM_CPU_DEVICES=N.
"""

import sys

from rich.console import Console
from rich.table import Table

from maxlite.config import exit_on_user_error, main_config


def main() -> int:
  cfg = main_config(sys.argv[1:], "shardings", needs_data=False)
  # JAX is loaded only for a command line that is right.
  from maxlite.training.trainer import build_trainer

  with exit_on_user_error("shardings"):
    trainer = build_trainer(cfg)
  degrees = " x ".join(f"{axis}={size}" for axis, size in trainer.mesh.shape.items())
  table = Table(title=f"{trainer.mesh.size} devices: {degrees}", box=None, title_justify="left")
  for column in ("parameter", "logical axes", "spec", "shape"):
    table.add_column(column)
  table.add_column("bytes per device", justify="right")
  for placement in trainer.placements:
    table.add_row(
      placement.path,
      " ".join(placement.names),
      str(placement.spec),
      " ".join(map(str, placement.shape)),
      f"{placement.bytes_per_device:,}",
    )
  total = sum(placement.num_bytes for placement in trainer.placements)
  local = sum(placement.bytes_per_device for placement in trainer.placements)
  table.add_row("all", "", "", f"{total:,} bytes in all", f"{local:,}", style="bold")
  # The width of the table, not of the terminal: nothing is cut off.
  Console(width=200, highlight=False, markup=False).print(table)
  return 0


if __name__ == "__main__":
  sys.exit(main())
