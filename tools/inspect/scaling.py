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
from collections.abc import Iterator
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
LARGEST = 1024  # chips


class Row(NamedTuple):
  """One plan."""

  model: str
  chips: int  # per slice
  slices: int = 1
  keys: tuple[str, ...] = ()

  @property
  def name(self) -> str:
    return f"{self.model}_{self.chips * self.slices}" + f"_{self.slices}" * (self.slices > 1)

  @property
  def arguments(self) -> list[str]:
    slices = [f"compile_topology_num_slices={self.slices}"] * (self.slices > 1)
    topology = f"compile_topology=v5p-{2 * self.chips}"
    return [*KEYS, f"model_name={self.model}", topology, *slices, *self.keys]

  @property
  def cfg(self) -> Config:
    return load_config(self.arguments)


SIZES: tuple[tuple[int, int, tuple[str, ...]], ...] = (
  (16, 1, ()),
  (64, 1, ()),
  (64, 4, ()),
  (256, 1, ()),
  (
    1024,
    1,
    ("ici_data_parallelism=4",),
  ),  # deepseek2-16b's latent of 512 limits fsdp
  (256, 4, ()),
  (64, 16, ()),
)
COMPILED = [Row(MODELS[0], 16), Row(MODELS[0], 64), Row(MODELS[0], 64, 4)]
COMPILED += [Row(MODELS[1], 16), Row(MODELS[1], 64)]
CHANGES = (
  ("as above: 4 rows per device, 4 expert shards", ()),
  ("1 row per device", ("per_device_batch_size=1",)),
  ("16 rows per device", ("per_device_batch_size=16",)),
  ("16 rows, 4 micro-batches", ("per_device_batch_size=16", "gradient_accumulation_steps=4")),
  ("8 expert shards", ("ici_expert_parallelism=8",)),
  ("1 expert shard", ("ici_expert_parallelism=1",)),
  ("2 tensor shards", ("ici_tensor_parallelism=2",)),
)


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--programs", type=Path, help="folder of compiled programs")
  parser.add_argument("--compile", metavar="NAME", help="compile only this row")
  args = parser.parse_args()
  rows = {row.name: row for row in COMPILED}
  if args.compile:
    _compile(rows[args.compile], args.programs / args.compile)
    return
  jax.config.update("jax_num_cpu_devices", LARGEST)
  tables = {"plans": list(_plans()), "changes": list(_changes())}
  if args.programs:
    tables["compiled"] = list(_comparison(args.programs))
  page = PAGE.read_text()
  for name, lines in tables.items():
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, rest = page.split(begin)
    page = before + begin + "\n" + "\n".join(lines) + "\n\n" + end + rest.split(end)[1]
  PAGE.write_text(page)


def _plans() -> Iterator[str]:
  yield (
    "| model | chips | mesh | state | peak | "
    + " | ".join(AXES)
    + " | matmuls | links | network | bottleneck |"
  )
  yield "|---" * (len(AXES) + 9) + "|"
  for row in [Row(model, *size) for model in MODELS for size in SIZES]:
    target = build_target(row.cfg, compiles=False)
    memory = _memory(row, target)
    state = memory.parameters + memory.optimizer
    held = f"{state / GB:.2f} | {memory.total / GB:.1f}"
    yield f"| {row.model} | {_chips(row)} | {_mesh(target)} | {held} | {_sent_and_times(target)} |"


@functools.cache
def _smallest(model: str) -> MemoryEstimate:
  return estimate_memory(build_target(Row(model, *SIZES[0]).cfg, compiles=False).trainer)


def _memory(row: Row, target: PlanTarget) -> MemoryEstimate:
  """Memory of a row of SIZES: that of the smallest row except for the state and its gradients."""
  state = target.trainer.abstract_state
  parameters = bytes_per_device(state.params)
  return _smallest(row.model)._replace(
    parameters=parameters, gradients=parameters, optimizer=bytes_per_device(state) - parameters
  )


def _changes() -> Iterator[str]:
  yield (
    "| model, 4 x 64 chips | change | "
    + " | ".join((*AXES, "tensor"))
    + " | matmuls | links | network | bottleneck |"
  )
  yield "|---" * (len(AXES) + 7) + "|"
  for model in MODELS:
    for label, keys in CHANGES:
      target = build_target(Row(model, 64, 4, keys).cfg, compiles=False)
      yield f"| {model} | {label} | {_sent_and_times(target, (*AXES, 'tensor'))} |"


def _chips(row: Row) -> str:
  return f"{row.slices} x {row.chips}" if row.slices > 1 else f"{row.chips:,}"


def _mesh(target: PlanTarget) -> str:
  return " x ".join(
    f"{axis}={size}" for axis, size in target.trainer.mesh.shape.items() if size > 1
  )


def _sent_and_times(target: PlanTarget, axes: tuple[str, ...] = AXES) -> str:
  """Cells: GB sent by mesh axes, milliseconds of each resource, and the bottleneck."""
  expected = estimate_collectives(target)
  sent = _by_axes(expected)
  cells = [f"{sent.pop(axis) / GB:.1f}" if sent.get(axis) else "" for axis in axes]
  assert not any(size > 0.02 * GB for size in sent.values()), sent
  (flops,) = target.trainer.flops_per_step
  bounds = step_bounds(CHIPS[target.kind], flops / target.trainer.mesh.size, None, expected)
  times = {bound.resource: 1e3 * bound.seconds for bound in bounds}
  cells += [
    f"{times[name]:.0f}" if name in times else "" for name in ("matmuls", "links", "network")
  ]
  return " | ".join([*cells, max(times, key=lambda name: times[name])])


def _by_axes(found: list[Collective]) -> dict[str, float]:
  """Bytes sent by mesh axes; combinations with `data` are one entry, and `network` another."""
  sent: dict[str, float] = {}
  for axes, size in sent_by_axes(found).items():
    name = "network" if axes.endswith("(network)") else "data" if "data" in axes else axes
    sent[name] = sent.get(name, 0.0) + size
  return sent


def _comparison(programs: Path) -> Iterator[str]:
  """Estimates against compiled programs; missing ones are compiled in subprocesses."""
  yield "| model | chips | GB | estimate | compiled | error | compiled in |"
  yield "|---|---|---|---|---|---|---|"
  for row in COMPILED:
    folder = programs / row.name
    if not (folder / "memory.json").exists():
      subprocess.run(
        [sys.executable, __file__, "--programs", str(programs), "--compile", row.name], check=True
      )
    stats = json.loads((folder / "memory.json").read_text())
    target = build_target(row.cfg, compiles=False)
    module = parse((folder / "train_step.hlo.txt").read_text())
    found = _by_axes(collectives(module, dict(target.trainer.mesh.shape), target.slices))
    guess = _by_axes(estimate_collectives(target))
    pairs = {"peak": (_memory(row, target).total, stats["peak_memory_in_bytes"])}
    pairs |= {f"sent, {axes}": (guess.get(axes, 0.0), found.get(axes, 0.0)) for axes in AXES}
    for name, (estimate, compiled) in pairs.items():
      if compiled > 0.02 * GB or estimate > 0.02 * GB:
        error = f"{estimate / compiled - 1:+.1%}" if compiled else "missing"
        cells = f"{estimate / GB:.2f} | {compiled / GB:.2f} | {error} | {stats['seconds']:.0f} s"
        yield f"| {row.model} | {_chips(row)} | {name} | {cells} |"


def _compile(row: Row, folder: Path) -> None:
  """Write the program's text, memory and compilation time to `folder`."""
  target = build_target(row.cfg, compiles=True)
  if target.missing:
    sys.exit(f"scaling.py: --programs needs {target.missing}")
  compiled = compile_step(target.trainer, str(folder))
  stats = {
    name: getattr(compiled.memory, name) for name in ("peak_memory_in_bytes", "temp_size_in_bytes")
  }
  (folder / "memory.json").write_text(json.dumps(stats | {"seconds": compiled.seconds}))


if __name__ == "__main__":
  main()
