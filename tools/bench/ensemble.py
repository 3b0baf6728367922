"""Benchmark of ensembles of small models against references timed in the same run.

  python tools/bench/ensemble.py [--rounds 7] [--processor-time] [section ...]

alike      64 MLPs of one shape with different learning rates (3 layers 8, 32 or 128 wide, 64 rows,
           Adam): stacked with hyperparameters, and with an `optax.adam(rate)` per member, against
           a Python loop over one jitted step, against `jax.vmap` by hand and, if torch is
           installed, against `torch.func` on stacked parameters
thousand   1,024 MLPs (3 layers 32 wide) likewise, and the time of `member_params`
adapters   16 adapters of rank 8 on a frozen MLP of 12 and of 100 million parameters: stacked on one
           base against a loop over one jitted step, with the sizes of the programs' arguments
decoders   the same for 12 decoders (2 layers, 64 wide, 8 x 64 tokens); then 12 decoders of
           different depth and width, as in `different`
different  24 MLPs (1, 2, 4 or 6 hidden layers, 8 to 256 wide): every strategy against a loop over
           24 jitted steps, against padding by hand under `vmap`, and against one program of the
           bare 24 steps, an upper bound for fusing
simulated  the same on 8 simulated CPU devices
grouped    the matrix products of one hidden layer of those 24 members, forward and backward: a dot
           per member against one grouped matmul whose groups are the members' widths

Each candidate runs in a separate process. Candidates alternate, and the minimum time of each is
reported, because other load can only add time. "start" is the time from the members to the end of
the first step: tracing, compilation, initialization. CPU time is summed over cores, so it does not
show the gain of using several. Memory is the peak of a candidate's process with its libraries,
without the processes that it starts.
"""

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from ensemble_candidates import ALIKE, DIFFERENT, GROUPED
from ensemble_problems import PROBLEMS, split_adapters
from ensemble_process import Timed, request, serve, started
from moe import print_ratio, print_ratio_of
from rich.console import Console
from rich.table import Table

from maxlite.registry import ENSEMBLE_STRATEGIES
from maxlite.sharding.pytree import PyTree

NUM_SIMULATED = 8
WARM_ROUNDS = 3


class Comparison(NamedTuple):
  """Results by candidate.

  Attributes:
    step: seconds per step.
    start: seconds from the members to the end of the first step.
    reports: what was requested, in the order of the request.
  """

  step: dict[str, float]
  start: dict[str, float]
  reports: dict[str, list[Any]]


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--rounds", type=int, default=7)
  parser.add_argument("--processor-time", action="store_true")
  parser.add_argument("--candidate", nargs=2, help=argparse.SUPPRESS)
  names = [*SECTIONS, []]  # argparse checks the empty default against the choices
  parser.add_argument("sections", nargs="*", choices=names, metavar="section")
  options = parser.parse_args()
  if options.candidate:
    name, problem = options.candidate
    return serve(name, problem)
  for section in options.sections or SECTIONS:
    SECTIONS[section](options)
  return 0


def alike(options: argparse.Namespace) -> None:
  for width in (8, 32, 128):
    goal = None
    if width <= 32:
      goal = 6
    compare_alike(f"64 MLPs, 3 layers of {width}", f"mlps_{width}", options, goal)


def compare_alike(
  title: str,
  problem: str,
  options: argparse.Namespace,
  goal: float | None = None,
) -> None:
  """Compare the ways to train members of one shape.

  Args:
    goal: the ratio of the loop to the stacked members that should be reached.
  """
  names = list(ALIKE)
  if not importlib.util.find_spec("torch"):
    names.remove("torch.func")
  result = compare(title, names, problem, 1, options)
  step = result.step
  for name in names[1:]:
    at_least = None
    if name == "loop":
      at_least = goal
    print_ratio_of(
      title,
      step,
      name,
      "stacked",
      at_least=at_least,
    )
  print_start_ratio(
    title,
    result.start,
    "stacked",
    "jax.vmap",
    at_most=1.2,
  )


def print_start_ratio(
  title: str,
  start: dict[str, float],
  numerator: str,
  denominator: str,
  at_most: float,
) -> None:
  """Print the ratio of the start times of two candidates."""
  ratio = start[numerator] / start[denominator]
  print_ratio(f"{title}: start, {numerator} / {denominator}", ratio, at_most=at_most)


def decoders(options: argparse.Namespace) -> None:
  compare_alike("12 decoders of one shape", "decoders_alike", options)
  compare_different("12 decoders", ["auto", *DIFFERENT], "decoders_different", 1, options)


def different(options: argparse.Namespace, num_devices: int = 1) -> None:
  names = ["auto", "pad + vmap", *DIFFERENT]
  title = f"24 MLPs, {num_devices} devices"
  step = compare_different(title, names, "mlps_different", num_devices, options)
  print_ratio_of(
    title,
    step,
    "pad + vmap",
    "auto",
    at_least=10,
  )


def compare_different(
  title: str,
  names: list[str],
  problem: str,
  num_devices: int,
  options: argparse.Namespace,
) -> dict[str, float]:
  """Compare the ways to train members of different shapes; returns the seconds of a step."""
  result = compare(title, names, problem, num_devices, options)
  step = result.step
  start = result.start
  strategies = ("auto", *ENSEMBLE_STRATEGIES)
  fastest = min(seconds for name, seconds in step.items() if name in strategies)
  print_ratio_of(
    title,
    step,
    "loop",
    "auto",
    at_least=1.5,
  )
  print_ratio_of(title, step, "loop", "one bare program")
  print_start_ratio(
    title,
    start,
    "auto",
    "loop",
    at_most=1,
  )
  print_ratio(f"{title}: auto / fastest strategy", step["auto"] / fastest, at_most=1.2)
  return step


def simulated(options: argparse.Namespace) -> None:
  different(options, NUM_SIMULATED)


def grouped(options: argparse.Namespace) -> None:
  title = "One hidden layer of 24 members"
  step = compare(title, list(GROUPED), "mlps_different", 1, options).step
  ratio = step["dots"] / step["grouped matmul"]
  print_ratio("grouped: a dot per member / grouped", ratio)


def thousand(options: argparse.Namespace) -> None:
  title = "1,024 MLPs, 3 layers of 32"
  names = ["stacked", "loop", "jax.vmap"]
  result = compare(
    title,
    names,
    "mlps_thousand",
    1,
    options,
    reports=["member_params"],
  )
  step = result.step
  print_ratio_of(title, step, "loop", "stacked")
  print_ratio_of(title, step, "stacked", "jax.vmap")
  print_start_ratio(
    title,
    result.start,
    "stacked",
    "jax.vmap",
    at_most=1.2,
  )
  (member_params_seconds,) = result.reports["stacked"]
  first, later = member_params_seconds
  print(f"{title}: member_params {first:.2f} s at first, then {1e3 * later:.2f} ms per member")


def adapters(options: argparse.Namespace) -> None:
  for problem, size in (("adapters_12m", "12 M"), ("adapters_100m", "100 M")):
    compare_adapters(f"16 adapters of rank 8 on {size} parameters", problem, options)


def compare_adapters(
  title: str,
  problem: str,
  options: argparse.Namespace,
) -> None:
  """Compare times, sizes of arguments, and early losses of adapters on one base."""
  loop = "loop over adapters"
  requested = ["argument_bytes", "losses"]
  step, _, reports = compare(
    title,
    ["stacked", loop],
    problem,
    1,
    options,
    reports=requested,
  )
  num_bytes, losses = reports["stacked"]
  num_bytes_of_loop, losses_of_loop = reports[loop]
  least = bytes_of_adapters(problem)
  relative = np.array(losses) / np.array(losses_of_loop)
  difference = np.max(np.abs(relative - 1))
  print_ratio_of(title, step, loop, "stacked")
  print(
    f"{title}: arguments {num_bytes / 1e6:,.1f} MB; "
    f"base and one adapter {num_bytes_of_loop / 1e6:,.1f}"
  )
  print_ratio(f"{title}: arguments / (base + 16 adapters)", num_bytes / least, at_most=1.05)
  print(f"{title}: early losses differ from those of the loop by a relative {difference:.1e}")


def bytes_of_adapters(problem: str) -> int:
  """The size of the base, and of all adapters with their moments."""
  own = PROBLEMS[problem]()
  model = own.models[0]
  inputs, _ = own.batch
  variables = jax.eval_shape(model.init, jax.random.key(0), inputs)
  adapter, base = split_adapters(variables["params"])
  adapter_and_moments = 3 * bytes_of_float32(adapter)
  return bytes_of_float32(base) + len(own.models) * adapter_and_moments


def bytes_of_float32(tree: PyTree) -> int:
  return 4 * sum(leaf.size for leaf in jax.tree.leaves(tree))


def compare(
  title: str,
  names: Sequence[str],
  problem: str,
  num_devices: int,
  options: argparse.Namespace,
  reports: Sequence[str] = (),
) -> Comparison:
  """Print a table of the candidates that can train these members.

  Args:
    reports: what else to request from every candidate at the end.
  """
  with contextlib.ExitStack() as processes:
    timed = start_all(processes, names, problem, num_devices)
    for _ in range(WARM_ROUNDS + options.rounds):
      for candidate in timed.values():
        candidate.measure()
    reported = {}
    for name, candidate in timed.items():
      reported[name] = [request(candidate.process, report) for report in reports]
  print_table(title, timed)
  step = {}
  start = {}
  for name, candidate in timed.items():
    if options.processor_time:
      step[name] = candidate.step_processor_seconds
      start[name] = candidate.start.processor
    else:
      step[name] = candidate.step_seconds
      start[name] = candidate.start.wall
  return Comparison(step, start, reported)


def start_all(
  processes: contextlib.ExitStack,
  names: Sequence[str],
  problem: str,
  num_devices: int,
) -> dict[str, Timed]:
  """Start all candidates that can train these members, except what `auto` already runs."""
  timed: dict[str, Timed] = {}
  for name in names:
    chosen = [other.strategy for other in timed.values()]
    if name in chosen:
      continue
    candidate = processes.enter_context(started(name, problem, num_devices))
    if candidate is not None:
      timed[name] = candidate
  return timed


def print_table(title: str, timed: dict[str, Timed]) -> None:
  table = Table(title=title, title_justify="left")
  table.add_column("")
  for column in ("start s", "CPU time", "step ms", "CPU time", "MiB", "useful FLOPs"):
    table.add_column(column, justify="right")
  for name, candidate in timed.items():
    shown = name
    if candidate.strategy:
      shown = f"{name} ({candidate.strategy})"
    table.add_row(
      shown,
      f"{candidate.start.wall:.1f}",
      f"{candidate.start.processor:.1f}",
      f"{1e3 * candidate.step_seconds:.2f}",
      f"{1e3 * candidate.step_processor_seconds:.2f}",
      f"{candidate.peak_mib:,.0f}",
      f"{candidate.useful_share:.0%}",
    )
  Console(width=100).print(table)


SECTIONS = {
  "alike": alike,
  "thousand": thousand,
  "decoders": decoders,
  "different": different,
  "simulated": simulated,
  "adapters": adapters,
  "grouped": grouped,
}
if __name__ == "__main__":
  sys.exit(main())
