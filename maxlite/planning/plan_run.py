"""`maxlite.plan`: prints the memory, FLOPs and communication of a training step."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from maxlite.config import Config, UserError, exit_on_user_error
from maxlite.config.schema import ModelConfig
from maxlite.metrics.chips import CHIPS
from maxlite.metrics.waits import report_wait
from maxlite.planning import plan_report
from maxlite.planning.comm_estimate import estimate_collectives
from maxlite.planning.hlo import Module, parse
from maxlite.planning.hlo_collectives import collectives
from maxlite.planning.hlo_cost import filled_shares, matmul_flops
from maxlite.planning.hlo_traffic import hbm_traffic
from maxlite.planning.memory_estimate import estimate_memory
from maxlite.planning.plan_target import PlanTarget, build_target
from maxlite.planning.roofline import exposed_seconds, step_bounds
from maxlite.sharding.compiler_options import describe_options
from maxlite.training.trainer import Trainer, build_trainer
from maxlite.training.transforms.local_updates import OUTER_SCOPE

_CONSOLE = Console(highlight=False, markup=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """A compiled training step."""

  module: Module
  memory: Any  # jax's CompiledMemoryStats, of one device
  once_bytes: float  # HBM bytes by XLA's cost analysis, which counts loops once; 0: unknown
  seconds: float  # of compilation


def run_plan(cfg: Config, *, compiles: bool = True) -> int:
  """Print the plan of `cfg`; return 1 if a step does not compile or does not fit, else 0.

  With `compiles=False` the plan has estimates only.
  """
  with exit_on_user_error("maxlite.plan"):
    target = build_target(cfg, compiles=compiles)
    compiles = compiles and not target.missing
    trainer = target.trainer
    options = trainer.compiler_options if compiles else {}  # refuses unknown ones here
  if target.missing:
    needed = f"compiling for {cfg.plan.compile_topology} needs {target.missing}"
    _CONSOLE.print(f"estimate only: {needed}")
  for line in describe_options(options, trainer.sharder.platform) if compiles else ():
    _CONSOLE.print(f"  {line}")
  phases = range(len(trainer.objectives))
  return 0 if all([_plan_step(target, phase, compiles=compiles) for phase in phases]) else 1


def run_phase_plan(cfg: Config) -> int:
  """Print what each phase of `cfg` trains and when, without compiling. Returns 0."""
  with exit_on_user_error("maxlite.plan"):
    plan = build_trainer(cfg).phase_plan
    if plan is None:
      raise UserError("the config has no phases; write phases=[{name: all, train: .*, steps: 1}]")
  spans = plan.spans(cfg.run.steps)
  _CONSOLE.print(*plan.describe(cfg.run.steps, cfg.data), "", sep="\n")
  unknown = ["phases end on conditions, so their steps are known only during the run"]
  _CONSOLE.print(*(plan_report.timeline_lines(spans) if spans else unknown), sep="\n")
  return 0


def compile_step(trainer: Trainer, save_hlo: str = "", phase: int = 0) -> CompiledStep:
  """Compile the step of a phase for the trainer's devices; write its HLO to folder `save_hlo`.

  Raises:
    jax.errors.JaxRuntimeError: compilation failed, such as for lack of memory.
  """
  start = time.perf_counter()
  with report_wait("tracing the training step"):
    lowered = trainer.lower_step(phase)
  with report_wait("compiling the training step"):
    program = lowered.compile()
  seconds = time.perf_counter() - start
  text = program.as_text()
  if save_hlo:
    folder = Path(save_hlo).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"train_step{f'_{phase}' * (phase > 0)}.hlo.txt").write_text(text)
  period = trainer.cfg.local_updates.diloco_sync_period
  outer_steps = {OUTER_SCOPE: 1 / period} if period else {}
  module = parse(text, _local_share(trainer.cfg.model), outer_steps)
  return CompiledStep(module, program.memory_analysis(), _once_bytes(program), seconds)


def _once_bytes(program: jax.stages.Compiled) -> float:
  """HBM bytes by XLA's cost analysis, which not every compiler has; 0: unknown."""
  try:
    analysis = program.cost_analysis()
  except (NotImplementedError, jax.errors.JaxRuntimeError):
    return 0.0
  return float((analysis or {}).get("bytes accessed", 0.0))


def _local_share(model: ModelConfig) -> float | None:
  """The share of local layers, which take the true branch of their scan's only conditional."""
  num_layers, every = model.base_num_decoder_layers, model.family.global_layer_every
  return 1 - num_layers // every / num_layers if every else None


def _plan_step(target: PlanTarget, phase: int, *, compiles: bool) -> bool:
  """Print the plan of the step of a phase; return whether it compiles and fits."""
  trainer, compiled = target.trainer, None
  if plan := trainer.phase_plan:
    _CONSOLE.print(plan.describe_phase(plan.phases[phase], trainer.cfg.data))
  _CONSOLE.print(_title(trainer, target.kind, phase))
  if compiles:
    try:
      compiled = compile_step(trainer, trainer.cfg.plan.save_hlo, phase)
    except jax.errors.JaxRuntimeError as error:
      _CONSOLE.print(f"does not compile: {' '.join(str(error).split())}")
  estimate = estimate_memory(trainer, phase)
  _CONSOLE.print("", *plan_report.memory_lines(estimate, compiled and compiled.memory), sep="\n")
  peak = compiled.memory.peak_memory_in_bytes if compiled else estimate.total
  fits = _print_fit(peak, target.kind)
  for lines in _costs(target, compiled, phase):
    _CONSOLE.print("", *lines, sep="\n")
  if compiled:
    _CONSOLE.print(f"\ncompiled in {compiled.seconds:.0f} s")
  return fits and bool(compiled or not compiles)


def _title(trainer: Trainer, kind: str, phase: int) -> str:
  cfg = trainer.cfg
  degrees = [f"{axis}={size}" for axis, size in trainer.mesh.shape.items() if size > 1]
  rows, length = trainer.objectives[phase].batch_shape
  return (
    f"{cfg.run.model_name or cfg.model.decoder_block} on {trainer.mesh.size} x {kind}, "
    f"{' x '.join(degrees) or 'no sharding'}; {rows} x {length} tokens per step, "
    f"remat_policy={cfg.model.remat_policy}"
  )


def _print_fit(needed: float, kind: str) -> bool:
  """Print whether `needed` bytes fit a device, if its memory is known.

  TPU compilers also reject a step that fits only without gaps between its arrays.
  """
  hbm = CHIPS[kind].hbm_bytes if kind in CHIPS else None
  if hbm is None:
    return True
  verdict = "fits" if needed <= hbm else "does not fit"
  _CONSOLE.print(f"{verdict}: {needed / hbm:.1%} of the {hbm / plan_report.GB:.1f} GB of a device")
  return needed <= hbm


def _costs(target: PlanTarget, compiled: CompiledStep | None, phase: int) -> list[list[str]]:
  """Paragraphs about FLOPs, communication and the roofline of a device."""
  mesh, kind = target.trainer.mesh, target.kind
  model_flops = target.trainer.flops_per_step[phase] / mesh.size
  estimated = estimate_collectives(target, phase)
  found, flops, moved, is_complete, paragraphs = estimated, model_flops, None, False, []
  if compiled:
    module = compiled.module
    compiled_flops = matmul_flops(module)
    paragraphs.append(plan_report.matmul_lines(compiled_flops, model_flops, module.unknown_loops))
    found = collectives(module, dict(mesh.shape), target.slices)
    flops = max(compiled_flops.total, model_flops)  # some kernels do not report theirs
    is_complete = not compiled_flops.kernels_unknown
    traffic = hbm_traffic(module)
    moved = sum(part.num_bytes for part in traffic)
    paragraphs.append(plan_report.traffic_lines(traffic))
    if compiled.once_bytes and not filled_shares(module):  # XLA counts receive buffers as full
      once = sum(part.num_bytes for part in hbm_traffic(module.with_loops_once()))
      paragraphs[-1].append(plan_report.compare_traffic(once, compiled.once_bytes))
  paragraphs.append(plan_report.comm_lines(estimated, found if compiled else None))
  paragraphs.append(plan_report.collective_lines(found, is_compiled=bool(compiled)))
  if period := target.trainer.cfg.local_updates.diloco_sync_period:
    paragraphs.append(plan_report.outer_lines(found, period))
  if kind in CHIPS:
    bounds = step_bounds(CHIPS[kind], flops, moved, found)
    useful_share = model_flops / flops if compiled else None
    exposed = exposed_seconds(CHIPS[kind], found)
    paragraphs.append(plan_report.roofline_lines(bounds, useful_share, exposed, is_complete))
  return [lines for lines in paragraphs if lines]
