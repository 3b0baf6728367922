"""Write the tables of docs/scaling.md: plans of two mixtures of experts for 16 to 1,024 chips.

  python tools/inspect/scaling.py                  # estimates; takes a minute
  python tools/inspect/scaling.py --programs DIR   # and compiled; minutes and up to 8 GB each

Programs already in DIR are reused. Compiling needs libtpu.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from maxlite.config import Config, load_config
from maxlite.plan import COMPILE_ONLY_ENV

os.environ.update(COMPILE_ONLY_ENV)

import jax

from maxlite.metrics.chips import CHIPS
from maxlite.planning.comm_estimate import estimate_collectives
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_collectives import Collective, collectives
from maxlite.planning.memory_estimate import MemoryEstimate, bytes_per_device, estimate_memory
from maxlite.planning.plan_report import GB, sent_by_axes
from maxlite.planning.plan_run import compile_step
from maxlite.planning.plan_target import PlanTarget, build_target
from maxlite.planning.roofline import step_bounds
from maxlite.training.program import flops_per_step

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scaling.md"
MODELS = ("deepseek2-16b", "mixtral-8x7b")
KEYS = (
  "configs/base.yml",
  "dtype=bfloat16",
  "remat_policy=full",
  "max_target_length=2048",
  "per_device_batch_size=4",
  "ici_fsdp_parallelism=-1",
  "ici_expert_parallelism=4",
)
AXES = ("fsdp", "fsdp x expert", "expert", "data", "network")
RESOURCES = ("matmuls", "links", "network")
TIMES = (*RESOURCES, "bottleneck")
LARGEST = 1024  # chips
NEGLIGIBLE = 0.02 * GB


class Row(NamedTuple):
  """One plan.

  Attributes:
    chips: the number of chips per slice.
    keys: additional key=value of the config.
  """

  model: str
  chips: int
  slices: int = 1
  keys: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    """The name of the folder of the compiled program."""
    name = f"{self.model}_{self.chips * self.slices}"
    if self.slices > 1:
      name += f"_{self.slices}"
    return name

  @property
  def cfg(self) -> Config:
    arguments = [
      *KEYS,
      f"model_name={self.model}",
      f"compile_topology=v5p-{2 * self.chips}",
      f"compile_topology_num_slices={self.slices}",
      *self.keys,
    ]
    return load_config(arguments)


def rows_of(model: str) -> list[Row]:
  """The plans of a model, by the number of chips."""
  return [
    Row(model, 16),
    Row(model, 64),
    Row(model, 64, slices=4),
    Row(model, 256),
    # The latent of deepseek2-16b, which has 512 channels, limits the fsdp axis.
    Row(model, 1024, keys=("ici_data_parallelism=4",)),
    Row(model, 256, slices=4),
    Row(model, 64, slices=16),
  ]


COMPILED = (
  Row("deepseek2-16b", 16),
  Row("deepseek2-16b", 64),
  Row("deepseek2-16b", 64, slices=4),
  Row("mixtral-8x7b", 16),
  Row("mixtral-8x7b", 64),
)
CHANGES: dict[str, tuple[str, ...]] = {
  "as above: 4 rows per device, 4 expert shards": (),
  "1 row per device": ("per_device_batch_size=1",),
  "16 rows per device": ("per_device_batch_size=16",),
  "16 rows, 4 micro-batches": ("per_device_batch_size=16", "gradient_accumulation_steps=4"),
  "8 expert shards": ("ici_expert_parallelism=8",),
  "1 expert shard": ("ici_expert_parallelism=1",),
  "2 tensor shards": ("ici_tensor_parallelism=2",),
}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--programs", type=Path, help="folder of compiled programs")
  parser.add_argument("--compile", metavar="NAME", help="compile only this row")
  args = parser.parse_args()
  if args.compile:
    rows = {row.name: row for row in COMPILED}
    _compile(rows[args.compile], args.programs / args.compile)
    return
  jax.config.update("jax_num_cpu_devices", LARGEST)
  page = PAGE.read_text()
  page = _replace_table(page, "plans", _plans())
  page = _replace_table(page, "changes", _changes())
  if args.programs:
    page = _replace_table(page, "compiled", _comparison(args.programs))
  PAGE.write_text(page)


def _replace_table(
  page: str,
  name: str,
  lines: Iterator[str],
) -> str:
  """The page with these lines between the marks of a table."""
  begin = f"<!-- {name} -->\n"
  end = f"<!-- end of {name} -->"
  before, rest = page.split(begin)
  _, after = rest.split(end)
  table = "\n".join(lines)
  return f"{before}{begin}\n{table}\n\n{end}{after}"


def _line(*cells: str) -> str:
  return f"| {' | '.join(cells)} |"


def _head(*titles: str) -> str:
  """The first two lines of a table."""
  return _line(*titles) + "\n" + "|---" * len(titles) + "|"


def _plans() -> Iterator[str]:
  """Memory, data sent and times of all plans."""
  yield _head("model", "chips", "mesh", "state", "peak", *AXES, *TIMES)
  for model in MODELS:
    for row in rows_of(model):
      target = build_target(row.cfg, compiles=False)
      memory = _memory(row, target)
      state = memory.parameters + memory.optimizer
      yield _line(
        model,
        _chips(row),
        _mesh(target),
        f"{state / GB:.2f}",
        f"{memory.total / GB:.1f}",
        *_sent_and_times(target, AXES),
      )


@functools.cache
def _smallest(model: str) -> MemoryEstimate:
  row = rows_of(model)[0]
  return estimate_memory(build_target(row.cfg, compiles=False).program)


def _memory(row: Row, target: PlanTarget) -> MemoryEstimate:
  """Memory of a plan: that of the smallest plan except for the state and its gradients."""
  state = target.program.abstract_state
  parameters = bytes_per_device(state.params)
  return _smallest(row.model)._replace(
    parameters=parameters,
    gradients=parameters,
    optimizer=bytes_per_device(state) - parameters,
  )


def _changes() -> Iterator[str]:
  """Data sent and times of 256 chips, with changed settings."""
  axes = (*AXES, "tensor")
  yield _head("model, 4 x 64 chips", "change", *axes, *TIMES)
  for model in MODELS:
    for label, keys in CHANGES.items():
      row = Row(model, 64, slices=4, keys=keys)
      target = build_target(row.cfg, compiles=False)
      yield _line(model, label, *_sent_and_times(target, axes))


def _chips(row: Row) -> str:
  if row.slices > 1:
    return f"{row.slices} x {row.chips}"
  return f"{row.chips:,}"


def _mesh(target: PlanTarget) -> str:
  """The axes of the mesh that have several shards."""
  degrees = []
  for axis, size in target.program.mesh.shape.items():
    if size > 1:
      degrees.append(f"{axis}={size}")
  return " x ".join(degrees)


def _sent_and_times(target: PlanTarget, axes: Sequence[str]) -> list[str]:
  """Cells: GB sent by mesh axes, milliseconds of each resource, and the bottleneck."""
  expected = estimate_collectives(target)
  sent = _by_axes(expected)
  cells = []
  for axis in axes:
    size = sent.pop(axis, 0.0)
    cells.append(f"{size / GB:.1f}" if size else "")
  assert all(size <= NEGLIGIBLE for size in sent.values()), sent
  (flops,) = flops_per_step(target.program)
  bounds = step_bounds(CHIPS[target.kind], flops / target.program.mesh.size, None, expected)
  seconds = {bound.resource: bound.seconds for bound in bounds}
  for resource in RESOURCES:
    cells.append(f"{1e3 * seconds[resource]:.0f}" if resource in seconds else "")
  bottleneck = max(seconds, key=lambda resource: seconds[resource])
  return [*cells, bottleneck]


def _by_axes(found: list[Collective]) -> dict[str, float]:
  """Bytes sent by mesh axes; combinations with `data` are one entry, and `network` another."""
  sent: dict[str, float] = {}
  for axes, size in sent_by_axes(found).items():
    name = axes
    if axes.endswith("(network)"):
      name = "network"
    elif "data" in axes:
      name = "data"
    sent[name] = sent.get(name, 0.0) + size
  return sent


def _comparison(programs: Path) -> Iterator[str]:
  """Estimates against compiled programs; missing ones are compiled in subprocesses."""
  yield _head("model", "chips", "GB", "estimate", "compiled", "error", "compiled in")
  for row in COMPILED:
    folder = programs / row.name
    if not (folder / "memory.json").exists():
      command = [sys.executable, __file__, "--programs", str(programs), "--compile", row.name]
      subprocess.run(command, check=True)
    stats = json.loads((folder / "memory.json").read_text())
    target = build_target(row.cfg, compiles=False)
    module = parse((folder / "train_step.hlo.txt").read_text())
    found = _by_axes(collectives(module, dict(target.program.mesh.shape), target.slices))
    guess = _by_axes(estimate_collectives(target))
    pairs = {"peak": (_memory(row, target).total, stats["peak_memory_in_bytes"])}
    for axes in AXES:
      pairs[f"sent, {axes}"] = (guess.get(axes, 0.0), found.get(axes, 0.0))
    for name, (estimate, compiled) in pairs.items():
      if max(estimate, compiled) <= NEGLIGIBLE:
        continue
      yield _line(
        row.model,
        _chips(row),
        name,
        f"{estimate / GB:.2f}",
        f"{compiled / GB:.2f}",
        f"{estimate / compiled - 1:+.1%}" if compiled else "missing",
        f"{stats['seconds']:.0f} s",
      )


def _compile(row: Row, folder: Path) -> None:
  """Write the program's text, memory and compilation time to `folder`."""
  target = build_target(row.cfg, compiles=True)
  if target.missing:
    sys.exit(f"scaling.py: --programs needs {target.missing}")
  compiled = compile_step(target.program, str(folder))
  stats = {
    "peak_memory_in_bytes": compiled.memory.peak_memory_in_bytes,
    "temp_size_in_bytes": compiled.memory.temp_size_in_bytes,
    "seconds": compiled.seconds,
  }
  (folder / "memory.json").write_text(json.dumps(stats))


if __name__ == "__main__":
  main()
