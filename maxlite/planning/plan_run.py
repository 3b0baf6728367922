"""`maxlite.plan`: prints the memory, FLOPs and communication of a training step."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import jax

from maxlite.config import Config
from maxlite.config.phases import phases_of
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError, exit_on_user_error
from maxlite.metrics.chips import CHIPS
from maxlite.metrics.waits import report_wait
from maxlite.metrics.writers import SafeConsole
from maxlite.models.layer_stacks import global_layers
from maxlite.planning import plan_report
from maxlite.planning.comm_estimate import estimate_collectives
from maxlite.planning.hlo import Module, parse
from maxlite.planning.hlo_collectives import Collective, collectives
from maxlite.planning.hlo_cost import filled_shares, matmul_flops
from maxlite.planning.hlo_traffic import hbm_traffic
from maxlite.planning.memory_estimate import estimate_memory
from maxlite.planning.plan_report import CompiledMemory
from maxlite.planning.plan_target import PlanTarget, build_target, tracing_for
from maxlite.planning.roofline import exposed_seconds, step_bounds
from maxlite.sharding.compiler_options import Options, describe_options
from maxlite.training.features.local_updates import OUTER_SCOPE
from maxlite.training.features.phases import phase_plan_of
from maxlite.training.program import Program, build_program, flops_per_step
from maxlite.training.spec import spec_of

_CONSOLE = SafeConsole(highlight=False, markup=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """A compiled training step.

  Attributes:
    module: the program.
    memory: its memory on one device.
    once_bytes: HBM bytes by XLA's cost analysis, which counts loops once; 0 if unknown.
    seconds: time of tracing and compilation.
  """

  module: Module
  memory: CompiledMemory
  once_bytes: float
  seconds: float


def run_plan(cfg: Config, *, compiles: bool = True) -> int:
  """Print the plan of `cfg`; return 1 if a step does not compile or does not fit, else 0.

  With `compiles=False` the plan has estimates only.
  """
  with exit_on_user_error("maxlite.plan"):
    if cfg.training.deterministic_reductions:
      raise UserError(
        "deterministic_reductions=true: the estimates are of sharded steps; write "
        "deterministic_reductions=false"
      )
    target = build_target(cfg, compiles=compiles)
    if target.missing:
      compiles = False
    program = target.program
    options: Options = {}
    if compiles:
      options = program.compiler_options  # raises UserError for unknown ones
  if target.missing:
    topology = cfg.plan.compile_topology
    _CONSOLE.print(f"estimate only: compiling for {topology} needs {target.missing}")
  if compiles:
    for line in describe_options(options, program.sharder.platform):
      _CONSOLE.print(f"  {line}")
  exit_code = 0
  with tracing_for(program.mesh.devices.flat[0]):
    for phase in range(len(program.objectives)):
      if not _plan_step(target, phase, compiles=compiles):
        exit_code = 1
  return exit_code


def run_phase_plan(cfg: Config) -> int:
  """Print what each phase of `cfg` trains and when, without compiling. Returns 0."""
  with exit_on_user_error("maxlite.plan"):
    plan = phase_plan_of(build_program(spec_of(cfg), command=cfg))
    if plan is None:
      raise UserError("the config has no phases; write phases=[{name: all, train: .*, steps: 1}]")
  for line in plan.describe(phases_of(cfg), cfg.run.steps, cfg.data):
    _CONSOLE.print(line)
  spans = plan.spans(cfg.run.steps)
  timeline = ["phases end on conditions, so their steps are known only during the run"]
  if spans:
    timeline = plan_report.timeline_lines(spans)
  _print_paragraph(timeline)
  return 0


def compile_step(program: Program, save_hlo: str = "", phase: int = 0) -> CompiledStep:
  """Compile the step of a phase for the program's devices.

  Args:
    program: the program whose step is compiled.
    save_hlo: a folder to which the step's HLO is written; "" for none.
    phase: index of the phase.

  Raises:
    jax.errors.JaxRuntimeError: compilation failed, such as for lack of memory.
  """
  start = time.perf_counter()
  with report_wait("tracing the training step"):
    lowered = program.lower(program.objectives[phase])
  with report_wait("compiling the training step"):
    compiled = lowered.compile()
  seconds = time.perf_counter() - start
  text = compiled.as_text()
  if text is None:
    raise RuntimeError("this compiler does not return the text of a program")
  if save_hlo:
    _write_hlo(text, save_hlo, phase)
  outer_steps: dict[str, float] = {}
  period = program.spec.local_updates.diloco_sync_period
  if period:
    outer_steps[OUTER_SCOPE] = 1 / period
  module = parse(text, _local_share(program.spec.model), outer_steps)
  memory = cast(CompiledMemory, compiled.memory_analysis())
  return CompiledStep(module, memory, _once_bytes(compiled), seconds)


def _write_hlo(text: str, save_hlo: str, phase: int) -> None:
  """Write the text of the program of a phase to the folder `save_hlo`."""
  name = "train_step.hlo.txt"
  if phase > 0:
    name = f"train_step_{phase}.hlo.txt"
  folder = Path(save_hlo).expanduser()
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / name
  path.write_text(text)


def _once_bytes(program: jax.stages.Compiled) -> float:
  """HBM bytes by XLA's cost analysis, which not every compiler has; 0: unknown."""
  try:
    analysis = program.cost_analysis()
  except (NotImplementedError, jax.errors.JaxRuntimeError):
    return 0.0
  if not analysis:
    return 0.0
  return float(analysis.get("bytes accessed", 0.0))


def _local_share(model: ModelConfig) -> float | None:
  """The share of local layers, which take the true branch of their scan's only conditional."""
  if not model.family.global_layer_every:
    return None
  return 1 - len(global_layers(model)) / model.base_num_decoder_layers


def _plan_step(target: PlanTarget, phase: int, *, compiles: bool) -> bool:
  """Print the plan of the step of a phase; return whether it compiles and fits."""
  program = target.program
  plan = phase_plan_of(program)
  if plan is not None:
    _CONSOLE.print(plan.describe_phase(phases_of(target.cfg)[phase], target.cfg.data))
  _CONSOLE.print(_title(target, phase))
  compiled = None
  if compiles:
    try:
      compiled = compile_step(program, target.cfg.plan.save_hlo, phase)
    except jax.errors.JaxRuntimeError as error:
      reason = " ".join(str(error).split())
      _CONSOLE.print(f"does not compile: {reason}")
  estimate = estimate_memory(program, phase)
  if compiled is None:
    _print_paragraph(plan_report.memory_lines(estimate, None))
    fits = _print_fit(estimate.total, target.kind)
    paragraphs = _estimated_costs(target, phase)
  else:
    _print_paragraph(plan_report.memory_lines(estimate, compiled.memory))
    fits = _print_fit(compiled.memory.peak_memory_in_bytes, target.kind)
    paragraphs = _compiled_costs(target, compiled, phase)
  for lines in paragraphs:
    _print_paragraph(lines)
  if compiled is not None:
    _CONSOLE.print(f"\ncompiled in {compiled.seconds:.0f} s")
  failed = compiles and compiled is None
  return fits and not failed


def _print_paragraph(lines: Sequence[str]) -> None:
  """Print an empty line and `lines`; nothing if there are none."""
  if lines:
    _CONSOLE.print()
  for line in lines:
    _CONSOLE.print(line)


def _title(target: PlanTarget, phase: int) -> str:
  cfg = target.cfg
  program = target.program
  name = cfg.run.model_name or cfg.model.decoder_block
  degrees = [f"{axis}={size}" for axis, size in program.mesh.shape.items() if size > 1]
  sharding = " x ".join(degrees) or "no sharding"
  rows, length = program.objectives[phase].batch_shape
  return (
    f"{name} on {program.mesh.size} x {target.kind}, {sharding}; {rows} x {length} tokens per "
    f"step, remat_policy={cfg.model.remat_policy}"
  )


def _print_fit(needed: float, kind: str) -> bool:
  """Print whether `needed` bytes fit a device, if its memory is known.

  TPU compilers also reject a step that fits only without gaps between its arrays.
  """
  if kind not in CHIPS:
    return True
  hbm = CHIPS[kind].hbm_bytes
  if hbm is None:
    return True
  fits = needed <= hbm
  verdict = "does not fit"
  if fits:
    verdict = "fits"
  share = needed / hbm
  _CONSOLE.print(f"{verdict}: {share:.1%} of the {hbm / plan_report.GB:.1f} GB of a device")
  return fits


def _estimated_costs(target: PlanTarget, phase: int) -> list[list[str]]:
  """Paragraphs about the estimated communication and the roofline of a device."""
  estimated = estimate_collectives(target, phase)
  paragraphs = [
    plan_report.comm_lines(estimated, None),
    plan_report.collective_lines(estimated, is_compiled=False),
    _outer_lines(target, estimated),
  ]
  if target.kind in CHIPS:
    chip = CHIPS[target.kind]
    lines = plan_report.roofline_lines(
      step_bounds(chip, _model_flops(target, phase), None, estimated),
      useful_share=None,
      exposed_seconds=exposed_seconds(chip, estimated),
      is_complete=False,
    )
    paragraphs.append(lines)
  return paragraphs


def _compiled_costs(target: PlanTarget, compiled: CompiledStep, phase: int) -> list[list[str]]:
  """Paragraphs about FLOPs, HBM traffic, communication and the roofline of a device."""
  module = compiled.module
  model_flops = _model_flops(target, phase)
  compiled_flops = matmul_flops(module)
  traffic = hbm_traffic(module)
  found = collectives(module, dict(target.program.mesh.shape), target.slices)
  paragraphs = [
    plan_report.matmul_lines(compiled_flops, model_flops, module.unknown_loops),
    plan_report.traffic_lines(traffic) + _compared_traffic(compiled),
    plan_report.comm_lines(estimate_collectives(target, phase), found),
    plan_report.collective_lines(found, is_compiled=True),
    _outer_lines(target, found),
  ]
  if target.kind in CHIPS:
    chip = CHIPS[target.kind]
    flops = max(compiled_flops.total, model_flops)  # some kernels do not report theirs
    hbm_bytes = sum(part.num_bytes for part in traffic)
    lines = plan_report.roofline_lines(
      step_bounds(chip, flops, hbm_bytes, found),
      useful_share=model_flops / flops,
      exposed_seconds=exposed_seconds(chip, found),
      is_complete=not compiled_flops.kernels_unknown,
    )
    paragraphs.append(lines)
  return paragraphs


def _model_flops(target: PlanTarget, phase: int) -> float:
  """FLOPs of a step of one device, without rematerialization and padding."""
  program = target.program
  return flops_per_step(program)[phase] / program.mesh.size


def _compared_traffic(compiled: CompiledStep) -> list[str]:
  """A line that compares HBM bytes with XLA's, if it has counted the same."""
  if not compiled.once_bytes or filled_shares(compiled.module):  # XLA counts buffers as full
    return []
  traffic = hbm_traffic(compiled.module.with_loops_once())
  once = sum(part.num_bytes for part in traffic)
  return [plan_report.compare_traffic(once, compiled.once_bytes)]


def _outer_lines(target: PlanTarget, found: Sequence[Collective]) -> list[str]:
  """Lines about the exchanges of replicas, if there are any."""
  period = target.program.spec.local_updates.diloco_sync_period
  if not period:
    return []
  return plan_report.outer_lines(found, period)
