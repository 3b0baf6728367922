"""The choice of a strategy for given members and devices.

A step's time is estimated from shapes: the FLOPs of matrix products, the bytes that are read and
written, and constant times per operation and per program. The estimates only need to be accurate
enough to rank strategies.
"""

import dataclasses
import math
import os
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from maxlite.config.errors import UserError
from maxlite.config.registry import ENSEMBLE_STRATEGIES
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.ensemble.engines.engine_base import EngineRequest, EnsembleEngine
from maxlite.ensemble.engines.grouping import NotAlikeError


@dataclasses.dataclass(frozen=True)
class DeviceCosts:
  """Speeds and times of a device; on a CPU, those of one program that runs alone."""

  flops_per_second: float
  bytes_per_second: float
  operation_seconds: float
  program_seconds: float  # to start one
  message_seconds: float  # to request a step from the worker processes
  compile_seconds: float  # per operation, in one thread; on CPUs, where XLA takes all cores, in all


DEVICE_COSTS = {
  "cpu": DeviceCosts(1e11, 2.5e10, 6e-7, 1e-4, 1e-3, 1e-3),
  "gpu": DeviceCosts(5e13, 1e12, 3e-6, 5e-5, 1e-3, 5e-3),
  "tpu": DeviceCosts(1e14, 1e12, 1e-6, 5e-5, 1e-3, 1e-2),
}
CORES_PER_PROGRAM = 1.5  # of two, that XLA:CPU keeps busy with one program
CLOSE = 1.05  # estimates within this factor are equal
_PRINTED_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class StrategyEstimate:
  """The estimated cost of one strategy."""

  strategy: str
  why_not: str = ""  # empty: it supports these members
  state_bytes: float = 0.0  # parameters and optimizer state on the fullest device
  useful_share: float = 1.0  # FLOPs of solo runs / FLOPs of the strategy
  num_programs: int = 0
  compile_seconds: float = 0.0
  step_seconds: float = math.inf


class PlanTable(Table):
  """A table for a rich console, or for `print`."""

  def __str__(self) -> str:
    console = Console(width=_PRINTED_WIDTH, color_system=None, force_jupyter=False)
    with console.capture() as capture:
      console.print(self)
    return capture.get().rstrip()


@dataclasses.dataclass(frozen=True)
class Plan:
  """The chosen strategy and the estimates behind the choice."""

  estimates: list[StrategyEstimate]
  strategy: str
  reason: str

  def table(self) -> PlanTable:
    """A row per supported strategy, the chosen one marked; the caption explains the others."""
    unsupported = [f"{e.strategy}: {e.why_not}" for e in self.estimates if e.why_not]
    table = PlanTable(
      title=f"strategy {self.strategy}: {self.reason}",
      caption="\n".join(unsupported) or None,
      title_justify="left",
      caption_justify="left",
    )
    for column in ("strategy", "state / device", "useful FLOPs", "programs", "compile", "step"):
      table.add_column(column, justify="left" if column == "strategy" else "right")
    for estimate in self.estimates:
      if estimate.why_not:
        continue
      mark = "> " if estimate.strategy == self.strategy else "  "
      table.add_row(
        mark + estimate.strategy,
        f"{estimate.state_bytes / 1e6:.3g} MB",
        f"{estimate.useful_share:.0%}",
        str(estimate.num_programs),
        f"{estimate.compile_seconds:.2g} s",
        f"{1e3 * estimate.step_seconds:.3g} ms",
      )
    return table


def choose(
  request: EngineRequest, strategy: str, memory_gb: float, *, remedy: str = "use fused"
) -> tuple[Plan, EnsembleEngine]:
  """(plan, engine) of `strategy`; `auto` takes the fastest that fits.

  Args:
    remedy: for the error about members that cannot be stacked.

  Raises:
    UserError: the strategy does not support these members, or none fits `memory_gb`.
  """
  names = [strategy]
  if strategy == "auto":
    names = [name for name in ENSEMBLE_STRATEGIES if name != "padded"]  # only by name
  estimates: dict[str, StrategyEstimate] = {}
  engines: dict[str, EnsembleEngine] = {}
  for name in names:
    try:
      engines[name] = ENSEMBLE_STRATEGIES[name](request)
      estimates[name] = estimate(name, engines[name], request)
    except (UserError, NotImplementedError) as error:  # JAX cannot vmap some callbacks
      why_not = " ".join(str(error).split())
      estimates[name] = StrategyEstimate(name, why_not=why_not)
      if strategy != "auto":
        end = f"; {remedy}" if isinstance(error, NotAlikeError) else ""
        raise UserError(f"strategy {name} cannot serve these members: {why_not}{end}") from None
  while True:
    best, reason = _choose_estimate(list(estimates.values()), memory_gb, request, strategy)
    try:
      engines[best.strategy].trace()
    except NotImplementedError as error:  # JAX cannot vmap some callbacks
      why_not = " ".join(str(error).split())
      if strategy != "auto":
        text = f"strategy {best.strategy} cannot serve these members: {why_not}; use submesh"
        raise UserError(text) from None
      estimates[best.strategy] = StrategyEstimate(best.strategy, why_not=why_not)
      continue
    return Plan(list(estimates.values()), best.strategy, reason), engines[best.strategy]


def _choose_estimate(
  estimates: Sequence[StrategyEstimate], memory_gb: float, request: EngineRequest, strategy: str
) -> tuple[StrategyEstimate, str]:
  """(the best estimate that fits, why it is the best)."""
  supported = [each for each in estimates if not each.why_not]
  if not supported:
    reasons = "; ".join(f"{each.strategy}: {each.why_not}" for each in estimates)
    raise UserError(f"no strategy supports these members: {reasons}")
  limit = memory_gb * 1e9 or math.inf
  fitting = [each for each in supported if each.state_bytes <= limit]
  if not fitting:
    least = min(each.state_bytes for each in supported)
    raise UserError(
      f"the members' states need {least / 1e9:.3g} GB on a device, and {memory_gb:g} GB are given: "
      "train fewer members, use more devices, or raise the limit"
    )
  least = min(each.step_seconds for each in fitting)
  fastest = [each for each in fitting if each.step_seconds <= least * CLOSE]
  soonest = min(each.compile_seconds for each in fastest)
  # The simplest: on CPUs, one program takes less time than many of as many operations in all.
  best = next(each for each in fastest if each.compile_seconds <= soonest * CLOSE)
  if request.spans_processes:  # whose estimates depend on their cores
    chosen = all_gather_object(best.strategy)[0]
    best = next(each for each in fitting if each.strategy == chosen)
  reason = "as configured" if strategy != "auto" else _reason(best, fitting)
  return best, reason


def estimate(name: str, engine: EnsembleEngine, request: EngineRequest) -> StrategyEstimate:
  """The estimate for a step of `engine` on the devices of the request."""
  platform = request.devices[0].platform
  costs = DEVICE_COSTS[platform]
  cores = os.cpu_count() or 1
  step = engine.step_cost()
  program = step.on_device
  parallelism = 1.0
  if platform == "cpu":  # its devices, simulated or not, share the cores
    program = step.total
    parallelism = max(min(step.num_devices, cores) / CORES_PER_PROGRAM, 1.0)
  seconds = (
    program.operations * costs.operation_seconds
    + program.bytes / costs.bytes_per_second
    + program.flops / costs.flops_per_second
  ) / parallelism + step.num_programs * costs.program_seconds
  if name == "processes":
    seconds += costs.message_seconds
  useful = sum(cost.flops for cost in engine.member_costs())
  compile_threads = 1 if platform == "cpu" else min(cores, step.num_programs)
  return StrategyEstimate(
    name,
    state_bytes=step.state_bytes,
    useful_share=min(useful / max(step.num_devices * step.on_device.flops, 1.0), 1.0),
    num_programs=step.num_programs,
    compile_seconds=step.operations_compiled * costs.compile_seconds / compile_threads,
    step_seconds=seconds,
  )


def _reason(best: StrategyEstimate, fitting: Sequence[StrategyEstimate]) -> str:
  others = sorted(
    (each for each in fitting if each is not best), key=lambda each: each.step_seconds
  )
  if not others:
    return "the only one that supports these members"
  factor = others[0].step_seconds / best.step_seconds
  if factor < CLOSE:
    is_first = best.compile_seconds * CLOSE < others[0].compile_seconds
    return f"{'starts sooner' if is_first else 'simpler'} than {others[0].strategy}, and as fast"
  return f"least time per step, {factor:.2g} x less than {others[0].strategy}"
