"""The choice of a strategy for given members and devices.

A step's time is estimated from shapes: the FLOPs of matrix products, the bytes that are read and
written, and constant times per operation and per program. The estimates only need to be accurate
enough to rank strategies.
"""

import dataclasses
import math
import os
import traceback
from collections.abc import Sequence

from rich.table import Table

from maxlite.distributed.object_collectives import all_gather_object
from maxlite.ensemble.engines.engine_base import EngineRequest, EnsembleEngine
from maxlite.ensemble.engines.grouping import NotAlikeError
from maxlite.ensemble.members.member import HyperparameterError
from maxlite.errors import UserError
from maxlite.metrics.writers import SafeConsole
from maxlite.registry import ENSEMBLE_STRATEGIES


@dataclasses.dataclass(frozen=True)
class DeviceCosts:
  """Speeds and times of a device; on a CPU, those of one program that runs alone."""

  flops_per_second: float
  bytes_per_second: float
  operation_seconds: float  # constant time of an operation
  program_seconds: float  # constant time of starting a program
  message_seconds: float  # time of requesting a step from the worker processes
  # Time of compiling an operation: in one thread, and on CPUs, where XLA takes all cores, in all.
  compile_seconds: float


DEVICE_COSTS = {
  "cpu": DeviceCosts(
    flops_per_second=1e11,
    bytes_per_second=2.5e10,
    operation_seconds=6e-7,
    program_seconds=1e-4,
    message_seconds=1e-3,
    compile_seconds=1e-3,
  ),
  "gpu": DeviceCosts(
    flops_per_second=5e13,
    bytes_per_second=1e12,
    operation_seconds=3e-6,
    program_seconds=5e-5,
    message_seconds=1e-3,
    compile_seconds=5e-3,
  ),
  "tpu": DeviceCosts(
    flops_per_second=1e14,
    bytes_per_second=1e12,
    operation_seconds=1e-6,
    program_seconds=5e-5,
    message_seconds=1e-3,
    compile_seconds=1e-2,
  ),
}
CORES_PER_PROGRAM = 1.5  # the cores, of two, that XLA:CPU keeps busy with one program
CLOSE = 1.05  # estimates within this factor count as equal
_PRINTED_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class StrategyEstimate:
  """The estimated cost of one strategy."""

  strategy: str
  why_not: str | None = None  # why the strategy does not support these members; None: it does
  state_bytes: float = 0.0  # parameters and optimizer state on the fullest device
  useful_share: float = 1.0  # FLOPs of solo runs / FLOPs of the strategy
  num_programs: int = 0  # calls of compiled programs per step
  compile_seconds: float = 0.0
  step_seconds: float = math.inf


class PlanTable(Table):
  """A table for a rich console, or for `print`."""

  def __str__(self) -> str:
    console = SafeConsole(width=_PRINTED_WIDTH, color_system=None, force_jupyter=False)
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
    supported = [each for each in self.estimates if each.why_not is None]
    unsupported = []
    for each in self.estimates:
      if each.why_not is not None:
        unsupported.append(f"{each.strategy}: {each.why_not}")
    table = PlanTable(
      title=f"strategy {self.strategy}: {self.reason}",
      caption="\n".join(unsupported) or None,
      title_justify="left",
      caption_justify="left",
    )
    table.add_column("strategy", justify="left")
    for column in ("state / device", "useful FLOPs", "programs", "compile", "step"):
      table.add_column(column, justify="right")
    for estimate in supported:
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
  request: EngineRequest,
  strategy: str,
  memory_gb: float,
  *,
  remedy: str = "use fused",
) -> tuple[Plan, EnsembleEngine]:
  """Build the engine of `strategy`; `auto` takes the fastest that fits.

  Args:
    request: the members, their data and their devices.
    strategy: a name of ENSEMBLE_STRATEGIES, or `auto`.
    memory_gb: the limit [GB] for the members' states on one device; 0: no limit.
    remedy: what the error about members that cannot be stacked proposes.

  Returns:
    (plan, engine)

  Raises:
    UserError: the strategy does not support these members, or none fits `memory_gb`.
  """
  if strategy != "auto":
    return _take_strategy(request, strategy, memory_gb, remedy)
  estimates: dict[str, StrategyEstimate] = {}
  engines: dict[str, EnsembleEngine] = {}
  for name, entry in ENSEMBLE_STRATEGIES.entries().items():
    if not entry.is_automatic:
      continue
    try:
      engines[name] = ENSEMBLE_STRATEGIES[name](request)
      estimates[name] = estimate(name, engines[name], request)
    except HyperparameterError:  # the user is to choose between two forms of other speeds
      raise
    except (UserError, NotImplementedError) as error:  # JAX cannot vmap some callbacks
      estimates[name] = StrategyEstimate(name, why_not=_reason_of(error))
  while True:
    fitting = _fitting(list(estimates.values()), memory_gb)
    best = _fastest(fitting, request)
    try:
      engines[best.strategy].trace()
    except NotImplementedError as error:
      estimates[best.strategy] = StrategyEstimate(best.strategy, why_not=_reason_of(error))
      continue
    plan = Plan(list(estimates.values()), best.strategy, _reason_of_choice(best, fitting))
    return plan, engines[best.strategy]


def _take_strategy(
  request: EngineRequest,
  strategy: str,
  memory_gb: float,
  remedy: str,
) -> tuple[Plan, EnsembleEngine]:
  """`choose` for one strategy, which the user named."""
  refused = f"strategy {strategy} cannot serve these members"
  try:
    engine = ENSEMBLE_STRATEGIES[strategy](request)
    own_estimate = estimate(strategy, engine, request)
  except NotAlikeError as error:
    raise UserError(f"{refused}: {_reason_of(error)}; {remedy}") from None
  except (UserError, NotImplementedError) as error:  # JAX cannot vmap some callbacks
    raise UserError(f"{refused}: {_reason_of(error)}") from None
  _fitting([own_estimate], memory_gb)
  try:
    engine.trace()
  except NotImplementedError as error:
    raise UserError(f"{refused}: {_reason_of(error)}; use submesh") from None
  return Plan([own_estimate], strategy, "as configured"), engine


def _reason_of(error: Exception) -> str:
  """The message on one line; for an error without one, which JAX raises, where it comes from."""
  message = " ".join(str(error).split())
  if message:
    return message
  source = error.__cause__ or error  # JAX's cause ends in the line that called the operation
  line = traceback.extract_tb(source.__traceback__)[-1]
  return (
    f"JAX cannot batch an operation of their modules on these devices ({type(error).__name__} "
    f"without a text, from {line.filename}:{line.lineno} in {line.name})"
  )


def _fitting(estimates: Sequence[StrategyEstimate], memory_gb: float) -> list[StrategyEstimate]:
  """The strategies that support the members and fit the memory.

  Raises:
    UserError: there is none.
  """
  supported = [each for each in estimates if each.why_not is None]
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
  return fitting


def _fastest(fitting: Sequence[StrategyEstimate], request: EngineRequest) -> StrategyEstimate:
  """The strategy with the fastest step; of equal ones, what compiles first, then the simplest."""
  least = min(each.step_seconds for each in fitting)
  fastest = [each for each in fitting if each.step_seconds <= least * CLOSE]
  soonest = min(each.compile_seconds for each in fastest)
  # The table lists the simplest first. On CPUs, one program takes less time than many that have as
  # many operations in all.
  best = next(each for each in fastest if each.compile_seconds <= soonest * CLOSE)
  if not request.spans_processes:
    return best
  # The estimates of other processes depend on their cores.
  chosen = all_gather_object(best.strategy)[0]
  return next(each for each in fitting if each.strategy == chosen)


def estimate(name: str, engine: EnsembleEngine, request: EngineRequest) -> StrategyEstimate:
  """The estimate for a step of `engine` on the devices of the request."""
  platform = request.devices[0].platform
  costs = DEVICE_COSTS[platform]
  num_cores = os.cpu_count() or 1
  step = engine.step_cost()
  if platform == "cpu":  # its devices, simulated or not, share the cores
    program = step.total
    parallelism = max(min(step.num_devices, num_cores) / CORES_PER_PROGRAM, 1.0)
    compile_threads = 1
  else:
    program = step.on_device
    parallelism = 1.0
    compile_threads = min(num_cores, step.num_programs)
  seconds_of_programs = (
    program.operations * costs.operation_seconds
    + program.bytes / costs.bytes_per_second
    + program.flops / costs.flops_per_second
  )
  seconds = seconds_of_programs / parallelism + step.num_programs * costs.program_seconds
  if ENSEMBLE_STRATEGIES.entry(name).starts_processes:
    seconds += costs.message_seconds
  useful_flops = sum(cost.flops for cost in engine.member_costs())
  computed_flops = max(step.num_devices * step.on_device.flops, 1.0)
  return StrategyEstimate(
    name,
    state_bytes=step.state_bytes,
    useful_share=min(useful_flops / computed_flops, 1.0),
    num_programs=step.num_programs,
    compile_seconds=step.operations_compiled * costs.compile_seconds / compile_threads,
    step_seconds=seconds,
  )


def _reason_of_choice(best: StrategyEstimate, fitting: Sequence[StrategyEstimate]) -> str:
  """Why `best` was chosen among the strategies that fit."""
  others = [each for each in fitting if each is not best]
  if not others:
    return "the only one that supports these members"
  second = min(others, key=lambda each: each.step_seconds)
  factor = second.step_seconds / best.step_seconds
  if factor >= CLOSE:
    return f"least time per step, {factor:.2g} x less than {second.strategy}"
  if best.compile_seconds * CLOSE < second.compile_seconds:
    return f"starts sooner than {second.strategy}, and as fast"
  return f"simpler than {second.strategy}, and as fast"
