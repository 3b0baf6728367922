"""Which strategy suits some members on some devices, from what their programs compute.

A step's time is put together from the matrix products' FLOPs, the bytes that operations write, a
price per operation and a price per program started. The prices are of a kind of device, measured
with tools/bench/ensemble.py; they need only be right enough to rank strategies.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from maxlite.config.errors import UserError
from maxlite.ensemble.strategies import STRATEGIES, Request


@dataclasses.dataclass(frozen=True)
class Prices:
  """Of one device (on a CPU, whose cores all share: of one program that has it to itself)."""

  flops_per_second: float
  bytes_per_second: float
  operation_seconds: float
  program_seconds: float  # to start one
  message_seconds: float  # to ask worker processes for a step
  compile_seconds: float  # of an operation, in one thread


PRICES = {
  "cpu": Prices(1e11, 2.5e10, 6e-7, 1e-4, 1e-3, 1e-3),
  "gpu": Prices(5e13, 1e12, 3e-6, 5e-5, 1e-3, 5e-3),
  "tpu": Prices(1e14, 1e12, 1e-6, 5e-5, 1e-3, 1e-2),
}
CORES_OF_A_PROGRAM = 1.5  # of two, that XLA:CPU keeps at work with one program
ALMOST = 1.05  # estimates this close are equal


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Of one strategy; `why_not` is set where it cannot serve."""

  strategy: str
  why_not: str = ""
  state_bytes: float = 0.0  # parameters and optimizer on the fullest device
  useful_share: float = 1.0  # FLOPs of the members alone / of the strategy
  num_programs: int = 0
  compile_seconds: float = 0.0
  step_seconds: float = math.inf


@dataclasses.dataclass(frozen=True)
class Plan:
  """The estimates by which a strategy was chosen."""

  estimates: list[Estimate]
  strategy: str
  reason: str

  def table(self) -> Table:
    """One row per strategy that can serve, the chosen one marked; below, why others cannot."""
    cannot = [f"{e.strategy}: {e.why_not}" for e in self.estimates if e.why_not]
    table = Table(
      title=f"strategy {self.strategy}: {self.reason}",
      caption="\n".join(cannot) or None,
      title_justify="left",
      caption_justify="left",
    )
    for column in ("strategy", "state / device", "useful FLOPs", "programs", "compile", "step"):
      table.add_column(column, justify="left" if column == "strategy" else "right")
    for estimate in self.estimates:
      mark = "> " if estimate.strategy == self.strategy else "  "
      if estimate.why_not:
        continue
      table.add_row(
        mark + estimate.strategy,
        f"{estimate.state_bytes / 1e6:.3g} MB",
        f"{estimate.useful_share:.0%}",
        str(estimate.num_programs),
        f"{estimate.compile_seconds:.2g} s",
        f"{1e3 * estimate.step_seconds:.3g} ms",
      )
    return table


def choose(request: Request, strategy: str, memory_gb: float) -> tuple[Plan, Any]:
  """(plan, engine) of `strategy`, or where that is `auto`, of the fastest that fits.

  Raises:
    UserError: the strategy cannot serve these members, or none fits `memory_gb`.
  """
  names = list(STRATEGIES) if strategy == "auto" else [strategy]
  estimates, engines = [], {}
  for name in names:
    try:
      engines[name] = STRATEGIES[name](request)
      estimates.append(estimate(name, engines[name], request))
    except ValueError as error:
      if strategy != "auto":
        raise UserError(f"strategy {name} cannot serve these members: {error}") from None
      estimates.append(Estimate(name, why_not=str(error)))
  budget = memory_gb * 1e9 or math.inf
  fitting = [e for e in estimates if not e.why_not and e.state_bytes <= budget]
  if not fitting:
    least = min((e.state_bytes for e in estimates if not e.why_not), default=math.inf)
    raise UserError(
      f"the members' states need {least / 1e9:.3g} GB on a device, and {memory_gb:g} GB are given: "
      "train fewer members, use more devices, or raise the bound"
    )
  least = min(e.step_seconds for e in fitting)
  as_fast = [e for e in fitting if e.step_seconds <= least * ALMOST]  # STRATEGIES: simplest first
  best = min(as_fast, key=lambda e: e.compile_seconds)
  reason = "as asked for" if strategy != "auto" else _reason(best, fitting)
  return Plan(estimates, best.strategy, reason), engines[best.strategy]


def estimate(name: str, engine: Any, request: Request) -> Estimate:
  """What a step of `engine` takes, by the prices of its devices."""
  platform = request.devices[0].platform
  prices = PRICES[platform]
  load = engine.load()
  cores = os.cpu_count() or 1
  cost, at_once = load.on_device, 1.0
  if platform == "cpu":  # whose devices, simulated or not, share the cores
    cost, at_once = load.total, max(min(load.num_devices, cores) / CORES_OF_A_PROGRAM, 1.0)
  seconds = (
    cost.operations * prices.operation_seconds
    + cost.bytes / prices.bytes_per_second
    + cost.flops / prices.flops_per_second
  ) / at_once + load.num_programs * prices.program_seconds
  if name == "processes":
    seconds += prices.message_seconds
  useful = sum(cost.flops for cost in request.costs)
  return Estimate(
    name,
    state_bytes=load.state_bytes,
    useful_share=min(useful / max(load.num_devices * load.on_device.flops, 1.0), 1.0),
    num_programs=load.num_programs,
    compile_seconds=load.operations_compiled
    * prices.compile_seconds
    / min(cores, load.num_programs),
    step_seconds=seconds,
  )


def _reason(best: Estimate, fitting: Sequence[Estimate]) -> str:
  others = sorted((e for e in fitting if e is not best), key=lambda e: e.step_seconds)
  if not others:
    return "the only one that can serve"
  factor = others[0].step_seconds / best.step_seconds
  if factor < ALMOST:
    is_first = best.compile_seconds < others[0].compile_seconds
    return f"{'starts sooner' if is_first else 'simpler'} than {others[0].strategy}, and as fast"
  return f"least time per step, {factor:.2g} x less than {others[0].strategy}"
