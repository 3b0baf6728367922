"""Print the sharding of every parameter.

  python tools/inspect/shardings.py configs/base.yml [key=value ...]

One line per parameter: logical axes, PartitionSpec, shape and bytes per device. Members of an
ensemble that have the same model are one table, whose parameters are stacked along the logical axis
`ensemble`. For a mesh larger than this machine, set JAX_NUM_CPU_DEVICES=N.
"""

import sys

import jax
from rich.console import Console
from rich.table import Table

from maxlite.config import Config, main_config
from maxlite.config.members import members_of
from maxlite.errors import exit_on_user_error
from maxlite.sharding.sharding_report import ParameterSharding, parameter_sharding
from maxlite.training.program import Program, build_program
from maxlite.training.spec import spec_of


def main() -> int:
  cfg = main_config(sys.argv[1:], "shardings", needs_data=False)
  with exit_on_user_error("shardings"):
    tables = []
    for group in groups_of(cfg):
      first = group[0]
      tables.append(table(build_program(spec_of(first), command=first), len(group)))
  for each in tables:
    # Wide enough that nothing is truncated, whatever the terminal.
    Console(width=200, highlight=False, markup=False).print(each)
  return 0


def groups_of(cfg: Config) -> list[list[Config]]:
  """The configs of the members, by model; of a run of one model, its config."""
  groups: dict[object, list[Config]] = {}
  for member in members_of(cfg):
    groups.setdefault(member.config.model, []).append(member.config)
  if not groups:
    return [[cfg]]
  return list(groups.values())


def shardings_of(program: Program, num_members: int) -> list[ParameterSharding]:
  """The sharding of every parameter, stacked if there are several members."""
  placements = program.parameters
  if num_members == 1:
    return placements
  stacked = []
  for placement in placements:
    stacked.append(
      parameter_sharding(
        placement.path,
        jax.ShapeDtypeStruct((num_members, *placement.shape), placement.dtype),
        ("ensemble", *placement.names),
        program.sharder,
      )
    )
  return stacked


def table(program: Program, num_members: int) -> Table:
  """A line per parameter, and the total."""
  mesh = program.mesh
  placements = shardings_of(program, num_members)
  degrees = " x ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
  result = Table(
    title=f"{mesh.size} devices: {degrees}",
    box=None,
    title_justify="left",
  )
  for column in ("parameter", "logical axes", "spec", "shape"):
    result.add_column(column)
  result.add_column("bytes per device", justify="right")
  for placement in placements:
    result.add_row(
      placement.path,
      " ".join(map(str, placement.names)),
      str(placement.spec),
      " ".join(map(str, placement.shape)),
      f"{placement.bytes_per_device:,}",
    )
  total = sum(placement.num_bytes for placement in placements)
  local = sum(placement.bytes_per_device for placement in placements)
  result.add_row(
    "all",
    "",
    "",
    f"{total:,} bytes in total",
    f"{local:,}",
    style="bold",
  )
  return result


if __name__ == "__main__":
  sys.exit(main())
